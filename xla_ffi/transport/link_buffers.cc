#if JAXRING_HAS_LIBFABRIC
#include "xla_ffi/transport/link_buffers.h"

#include <sys/mman.h>

#include <new>
#include <stdexcept>

namespace jaxring {

BufferBlock::BufferBlock(fid_domain* domain, bool registers, int count, int64_t bytes,
                         OfiLink* link, LinkBuffer::Use use, void* owner)
    : buffers_(count) {
  const int64_t stride = (bytes + JR_CACHE_LINE - 1) / JR_CACHE_LINE * JR_CACHE_LINE;
  bytes_ = stride * count;
  // Pages that nothing arrives in cost nothing.
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  if (registers && fi_mr_reg(domain, memory_, bytes_, FI_SEND | FI_RECV, 0, 0, 0, &registration_,
                             nullptr) != 0) {
    munmap(memory_, bytes_);
    throw std::runtime_error(
        "libfabric could not register memory with the network card; raise the limit of locked "
        "memory (ulimit -l unlimited)");
  }
  for (int i = 0; i < count; ++i) {
    LinkBuffer& buffer = buffers_[i];
    buffer.link = link;
    buffer.owner = owner;
    buffer.data = memory_ + i * stride;
    buffer.descriptor = registration_ != nullptr ? fi_mr_desc(registration_) : nullptr;
    buffer.bytes = bytes;
    buffer.use = use;
  }
}

BufferBlock::BufferBlock(BufferBlock&& other) noexcept
    : memory_(other.memory_),
      bytes_(other.bytes_),
      registration_(other.registration_),
      buffers_(std::move(other.buffers_)) {
  other.memory_ = nullptr;
  other.registration_ = nullptr;
}

BufferBlock::~BufferBlock() {
  if (registration_ != nullptr) fi_close(&registration_->fid);
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

}  // namespace jaxring
#endif
