# CUDA is found, never assumed. Sets JAXRING_HAVE_CUDA and, where it is on, makes the static library jaxring_cuda: the kernels
# and their launcher (xla_ffi/cuda/kernels.h). Any complete toolkit will do, the system's or that of NVIDIA's wheels
# (pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl; CUDA_HOME=…/site-packages/nvidia/cu13).
set(JAXRING_HAVE_CUDA OFF)
set(JAXRING_CUDA_ARCHITECTURES "80;90;100;120" CACHE STRING
  "GPUs to compile for, as compute capabilities without the point; the last one's PTX is added for later GPUs")

if(NOT JAXRING_CUDA STREQUAL "OFF")
  find_program(JAXRING_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
  if(NOT JAXRING_NVCC)
    set(reason "no nvcc was found on PATH or under CUDA_HOME")
  else()
    # An nvcc on PATH proves nothing (mpi4jax's install broke on one without headers): compile something.
    set(probe ${PROJECT_BINARY_DIR}/cuda_probe.cu)
    file(WRITE ${probe} "#include <cuda_runtime.h>\n__global__ void probe(int* x) { *x = threadIdx.x; }\n")
    execute_process(COMMAND ${JAXRING_NVCC} -c ${probe} -o ${probe}.o
      RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
      set(reason "${JAXRING_NVCC} can't compile a file that includes cuda_runtime.h")
    else()
      set(JAXRING_HAVE_CUDA ON)
    endif()
  endif()
  if(JAXRING_HAVE_CUDA)
    message(STATUS "jaxring: CUDA found (${JAXRING_NVCC})")
  elseif(JAXRING_CUDA STREQUAL "ON")
    message(FATAL_ERROR "jaxring: JAXRING_CUDA=ON asks for CUDA, but ${reason}; install the CUDA toolkit "
      "with its headers, or leave JAXRING_CUDA at AUTO.")
  else()
    message(STATUS "jaxring: building for CPU only: ${reason}")
  endif()
endif()
if(NOT JAXRING_HAVE_CUDA)
  return()
endif()

set(targets "")
foreach(architecture IN LISTS JAXRING_CUDA_ARCHITECTURES)
  list(APPEND targets -gencode arch=compute_${architecture},code=sm_${architecture})
endforeach()
list(GET JAXRING_CUDA_ARCHITECTURES -1 newest)
list(APPEND targets -gencode arch=compute_${newest},code=compute_${newest})

# nvcc by hand and not as CMake's language CUDA, which every build without CUDA would have to enable or work around.
set(nvcc_flags -std=c++17 -O3 ${targets} -I${PROJECT_SOURCE_DIR} -Werror all-warnings
  -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror -Xptxas=-v,-warn-spills)
file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/xla_ffi/cuda/*.cu)
set(cuda_objects "")
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda)
foreach(source IN LISTS cuda_sources)
  get_filename_component(name ${source} NAME_WE)
  set(object ${PROJECT_BINARY_DIR}/cuda/${name}.o)
  # The log holds ptxas's report of registers and spills (tests/cuda/check_build.py).
  add_custom_command(OUTPUT ${object} DEPENDS ${source} DEPFILE ${object}.d
    COMMAND sh ${PROJECT_SOURCE_DIR}/cmake/quietly.sh ${object}.log
      ${JAXRING_NVCC} ${nvcc_flags} -c -MD -MF ${object}.d ${source} -o ${object}
    COMMENT "nvcc ${name}.cu")
  list(APPEND cuda_objects ${object})
endforeach()
set_source_files_properties(${cuda_objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
add_library(jaxring_cuda STATIC EXCLUDE_FROM_ALL ${cuda_objects})
set_target_properties(jaxring_cuda PROPERTIES LINKER_LANGUAGE CXX)
