# Finds the XLA FFI headers and refuses ones that are too new. Sets ffi_include. Needs jaxring_ask_python.
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
set(JAXRING_FFI_NEWEST_MINOR 3 CACHE STRING "Newest headers to accept; more than 3 gives a build for one jaxlib only")
set(newest_minor ${JAXRING_FFI_NEWEST_MINOR})
file(STRINGS ${c_api} minor_line REGEX "#define XLA_FFI_API_MINOR")
string(REGEX REPLACE ".*XLA_FFI_API_MINOR +([0-9]+).*" "\\1" ffi_minor "${minor_line}")
if(NOT ffi_minor MATCHES "^[0-9]+$" OR ffi_minor GREATER newest_minor)
  message(FATAL_ERROR "jaxring: the XLA FFI headers in ${ffi_include} have minor API version ${ffi_minor}, but at most "
    "${newest_minor} may be used (a newer one breaks jax 0.10.2); install jaxlib==0.10.2 for the build, or set "
    "JAXRING_FFI_INCLUDE_DIR to its include folder.")
endif()
message(STATUS "jaxring: XLA FFI headers with minor API version ${ffi_minor} in ${ffi_include}")

