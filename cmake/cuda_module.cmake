# The optional Python module jaxring._cuda: the kernels, the CUDA side of the handlers, and their bindings. A module of its
# own, so that an installation without CUDA neither needs nor looks for it. cudart is static: no library of a particular
# CUDA release is needed at run time, only the driver, which is looked for when a GPU is first asked for.
if(NOT TARGET jaxring_cuda)
  return()
endif()
find_package(CUDAToolkit REQUIRED)

file(GLOB cuda_ffi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/xla_ffi/cuda_ffi/*.cc)
nanobind_add_module(_cuda STABLE_ABI NB_STATIC NB_DOMAIN jaxring NOMINSIZE ${cuda_ffi_sources}
  ${PROJECT_SOURCE_DIR}/xla_ffi/ffi/attributes.cc ${PROJECT_SOURCE_DIR}/xla_ffi/ffi/error_details.cc)
target_include_directories(_cuda SYSTEM PRIVATE ${ffi_include})
target_link_libraries(_cuda PRIVATE jaxring_cuda jaxring_engine jaxring_flags CUDA::cudart_static)

nanobind_add_stub(_cuda_stub MODULE _cuda OUTPUT ${PROJECT_BINARY_DIR}/_cuda.pyi
  PYTHON_PATH $<TARGET_FILE_DIR:_cuda> DEPENDS _cuda)
add_dependencies(jaxring_wheel _cuda _cuda_stub)
install(TARGETS _cuda LIBRARY DESTINATION jaxring)
install(FILES ${PROJECT_BINARY_DIR}/_cuda.pyi DESTINATION jaxring)

if(JAXRING_DEV_INPLACE)
  add_custom_target(jaxring_cuda_inplace ALL DEPENDS _cuda _cuda_stub
    COMMAND ${CMAKE_COMMAND} -E copy_if_different $<TARGET_FILE:_cuda> ${PROJECT_BINARY_DIR}/_cuda.pyi
      ${PROJECT_SOURCE_DIR}/jaxring/)
endif()

# A part of tests/cuda/gpu_check.py.
option(JAXRING_GPU_CHECK "Build gpu_check_ranks, which `make gpu-check` runs" OFF)
if(JAXRING_GPU_CHECK)
  add_executable(gpu_check_ranks ${PROJECT_SOURCE_DIR}/tests/cuda/gpu_check_ranks.cc)
  target_link_libraries(gpu_check_ranks PRIVATE jaxring_cuda jaxring_flags CUDA::cudart_static)
endif()
