// A fixed number of 16-byte allreduces between two ranks, for counting instructions:
//   small_message_path processes 1000
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "benchmarks/ranks.h"

int main(int argc, char** argv) {
  using namespace jaxring;
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s processes|devices OPERATIONS\n", argv[0]);
    return 2;
  }
  const bool devices = std::strcmp(argv[1], "devices") == 0;
  benchmarks::Ranks ranks(devices ? testing::Layout::kDevices : testing::Layout::kProcesses, 2,
                          Collective::kAllreduce, 16);
  ranks.run(std::atoi(argv[2]));
}
