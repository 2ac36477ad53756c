#include "xla_ffi/host/huge_pages.h"

#include <sys/mman.h>

namespace jaxring {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;
constexpr int64_t kLeastBytes = 4 << 20;

}  // namespace

void prefer_huge_pages(void* data, int64_t bytes) {
  if (bytes < kLeastBytes) return;
  const intptr_t begin =
      (reinterpret_cast<intptr_t>(data) + kHugePageBytes - 1) & ~(kHugePageBytes - 1);
  const intptr_t end = (reinterpret_cast<intptr_t>(data) + bytes) & ~(kHugePageBytes - 1);
  if (end <= begin) return;
  // A hint: a kernel without such pages refuses it.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace jaxring
