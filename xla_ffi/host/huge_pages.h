// Large fresh results in large pages.
#pragma once

#include <cstdint>

namespace jaxring {

// XLA allocates a result for each call, and touching 64 MiB of it for the first time takes 16,384
// page faults: 32 ms, where 2 MiB pages take 6 (docs/performance.md). To be called before the first
// write; it costs a system call, and nothing happens where the kernel has no such pages or the
// memory is too small.
void prefer_huge_pages(void* data, int64_t bytes);

}  // namespace jaxring
