# The Python module jaxring._native: the engine, the XLA FFI handlers and the nanobind bindings.
# scikit-build-core asks for the stable ABI where pyproject.toml's wheel.py-api is no newer than the Python at hand.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})

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

include(cmake/ffi_headers.cmake)

file(GLOB ffi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/xla_ffi/ffi/*.cc)
# NOMINSIZE: nanobind's default is -Os, which costs the handlers more than the size is worth.
nanobind_add_module(_native STABLE_ABI NB_STATIC NB_DOMAIN jaxring NOMINSIZE ${ffi_sources})
target_include_directories(_native SYSTEM PRIVATE ${ffi_include}) # SYSTEM: the headers warn (-Wreturn-type)
target_link_libraries(_native PRIVATE jaxring_engine jaxring_flags)
foreach(library nanobind-static nanobind-static-abi3)
  if(TARGET ${library})
    set_property(TARGET ${library} PROPERTY SYSTEM ON)
  endif()
endforeach()

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
