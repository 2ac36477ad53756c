# The reduction kernels. Included by the top-level CMakeLists.txt once the target jaxring_engine exists:
# adds reduce_kernels.cc to it, and reduce_kernels_level.cc once per CPU level. A compiler that doesn't
# know a level (GCC before 12) leaves it out; the baseline is always there.
include(CheckCXXSourceCompiles)

set(JAXRING_KERNELS_DIR ${CMAKE_CURRENT_LIST_DIR})
set(JAXRING_CPU_LEVELS "") # JR_LEVEL(identifier,"name")…, best first; reduce_kernels.cc expands it

# -O3: GCC 12 vectorises fully only there, and conversions of small floats only with -fno-trapping-math
# (nobody reads the floating-point exception flags). -ffp-contract=off: a fused multiply-add, which only
# some levels have, would make a complex product depend on the machine.
function(jaxring_add_kernels identifier)
  add_library(jaxring_kernels_${identifier} OBJECT ${JAXRING_KERNELS_DIR}/reduce_kernels_level.cc)
  target_compile_definitions(jaxring_kernels_${identifier} PRIVATE JR_CPU_LEVEL=${identifier})
  target_compile_options(jaxring_kernels_${identifier} PRIVATE -O3 -ffp-contract=off -fno-trapping-math ${ARGN})
  target_link_libraries(jaxring_kernels_${identifier} PRIVATE jaxring_flags)
  target_sources(jaxring_engine PRIVATE $<TARGET_OBJECTS:jaxring_kernels_${identifier}>)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  foreach(level x86-64-v4 x86-64-v3)
    string(REPLACE "-" "_" identifier ${level})
    set(CMAKE_REQUIRED_FLAGS -march=${level})
    check_cxx_source_compiles(
      "int main() { return __builtin_cpu_supports(\"${level}\"); }" JAXRING_COMPILER_KNOWS_${identifier})
    unset(CMAKE_REQUIRED_FLAGS)
    if(JAXRING_COMPILER_KNOWS_${identifier})
      jaxring_add_kernels(${identifier} -march=${level})
      string(APPEND JAXRING_CPU_LEVELS "JR_LEVEL(${identifier},\"${level}\")")
    endif()
  endforeach()
endif()
jaxring_add_kernels(baseline)

target_sources(jaxring_engine PRIVATE ${JAXRING_KERNELS_DIR}/reduce_kernels.cc)
set_source_files_properties(${JAXRING_KERNELS_DIR}/reduce_kernels.cc
  PROPERTIES COMPILE_DEFINITIONS "JR_CPU_LEVELS=${JAXRING_CPU_LEVELS}")
