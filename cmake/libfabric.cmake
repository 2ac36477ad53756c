# Links between hosts are compiled where libfabric's headers are; the library itself is looked for at run time, and only
# when ranks are on different hosts.
option(JAXRING_LIBFABRIC "Compile the links between hosts where libfabric's headers are found" ON)
if(JAXRING_LIBFABRIC)
  find_path(JAXRING_LIBFABRIC_INCLUDE_DIR rdma/fabric.h)
endif()
if(JAXRING_LIBFABRIC AND JAXRING_LIBFABRIC_INCLUDE_DIR)
  target_compile_definitions(jaxring_engine PUBLIC JAXRING_HAS_LIBFABRIC=1)
  target_include_directories(jaxring_engine SYSTEM PUBLIC ${JAXRING_LIBFABRIC_INCLUDE_DIR})
else()
  message(STATUS "jaxring: no libfabric headers (apt-get install libfabric-dev): ranks must be on one host")
  target_compile_definitions(jaxring_engine PUBLIC JAXRING_HAS_LIBFABRIC=0)
endif()
