# CUDA is found, never assumed. Sets JAXRING_HAVE_CUDA; the target `cuda-check` compiles tests/cuda/*.cu (no GPU needed).
# Nothing that needs CUDA is installed yet.
set(JAXRING_HAVE_CUDA OFF)

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

if(JAXRING_HAVE_CUDA)
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/cuda/*.cu)
  set(cuda_objects "")
  foreach(source IN LISTS cuda_sources)
    get_filename_component(name ${source} NAME_WE)
    set(object ${PROJECT_BINARY_DIR}/cuda/${name}.o)
    add_custom_command(OUTPUT ${object} DEPENDS ${source} DEPFILE ${object}.d
      COMMAND ${JAXRING_NVCC} -std=c++17 -c -MD -MF ${object}.d -I${PROJECT_SOURCE_DIR} ${source} -o ${object}
      COMMENT "nvcc ${name}.cu")
    list(APPEND cuda_objects ${object})
  endforeach()
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuda)
  add_custom_target(cuda-check DEPENDS ${cuda_objects})
endif()
