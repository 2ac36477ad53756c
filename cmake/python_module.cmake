# The Python module jaxring._native: the engine, the XLA FFI handlers and the nanobind bindings.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

function(jaxring_ask_python expression output)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${expression}"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE error RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "jaxring: ${Python_EXECUTABLE} has no nanobind or jaxlib: run "
      "`${Python_EXECUTABLE} -m pip install nanobind jaxlib==0.10.2` and configure again (${error})")
  endif()
  set(${output} "${answer}" PARENT_SCOPE)
endfunction()

jaxring_ask_python("import nanobind; print(nanobind.cmake_dir())" nanobind_ROOT)
find_package(nanobind CONFIG REQUIRED)

set(ffi_include ${JAXRING_FFI_INCLUDE_DIR})
if(NOT ffi_include)
  # jaxlib is light to import; jax (whose jax.ffi.include_dir() says the same) is not a build requirement.
  jaxring_ask_python("import os, jaxlib; print(os.path.join(os.path.dirname(jaxlib.__file__), 'include'))" ffi_include)
endif()
set(c_api ${ffi_include}/xla/ffi/api/c_api.h)
if(NOT EXISTS ${c_api})
  message(FATAL_ERROR "jaxring: the XLA FFI headers were expected at ${c_api}, which doesn't exist; "
    "install jaxlib==0.10.2 or set JAXRING_FFI_INCLUDE_DIR.")
endif()
# Compatibility is one-way: a library built with newer headers is refused by an older jaxlib, and takes the whole CPU
# backend down with it (XLA's handler registration compares minor versions). 3 is jaxlib 0.10.2's, the oldest we support.
set(newest_minor 3)
file(STRINGS ${c_api} minor_line REGEX "#define XLA_FFI_API_MINOR")
string(REGEX REPLACE ".*XLA_FFI_API_MINOR +([0-9]+).*" "\\1" ffi_minor "${minor_line}")
if(NOT ffi_minor MATCHES "^[0-9]+$" OR ffi_minor GREATER newest_minor)
  message(FATAL_ERROR "jaxring: the XLA FFI headers in ${ffi_include} have minor API version ${ffi_minor}, but at most "
    "${newest_minor} may be used (a newer one breaks jax 0.10.2); install jaxlib==0.10.2 for the build, or set "
    "JAXRING_FFI_INCLUDE_DIR to its include folder.")
endif()
message(STATUS "jaxring: XLA FFI headers with minor API version ${ffi_minor} in ${ffi_include}")

file(GLOB ffi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/xla_ffi/ffi/*.cc)
# NOMINSIZE: nanobind's default is -Os, which costs the handlers more than the size is worth.
nanobind_add_module(_native NB_STATIC NB_DOMAIN jaxring NOMINSIZE ${ffi_sources})
target_include_directories(_native SYSTEM PRIVATE ${ffi_include}) # SYSTEM: the headers warn (-Wreturn-type)
target_link_libraries(_native PRIVATE jaxring_engine jaxring_flags)
set_property(TARGET nanobind-static PROPERTY SYSTEM ON)

nanobind_add_stub(_native_stub MODULE _native OUTPUT ${PROJECT_BINARY_DIR}/_native.pyi
  PYTHON_PATH $<TARGET_FILE_DIR:_native> DEPENDS _native)

add_custom_target(jaxring_wheel DEPENDS _native _native_stub)
install(TARGETS _native LIBRARY DESTINATION jaxring)
install(FILES ${PROJECT_BINARY_DIR}/_native.pyi DESTINATION jaxring)

if(JAXRING_DEV_INPLACE)
  add_custom_target(jaxring_inplace ALL DEPENDS jaxring_wheel
    COMMAND ${CMAKE_COMMAND} -E copy_if_different $<TARGET_FILE:_native> ${PROJECT_BINARY_DIR}/_native.pyi
      ${PROJECT_SOURCE_DIR}/jaxring/)
endif()
