// Memory that frames are sent from and received in, registered where the provider wants that.
#pragma once

#include <rdma/fi_domain.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/transport/link_frames.h"

namespace jaxring {

class OfiLink;

// `context` comes first: libfabric hands its address back when a transfer is done.
struct LinkBuffer {
  enum Use : uint8_t { kReceive, kSlice, kRecords, kControl };

  fi_context context{};
  OfiLink* link = nullptr;
  void* owner = nullptr;  // the LinkSender of a slice
  char* data = nullptr;
  void* descriptor = nullptr;
  int64_t bytes = 0;
  Use use = kReceive;
  bool busy = false;  // of those that are sent from: until the library is done with it

  FrameHeader& header() const { return *reinterpret_cast<FrameHeader*>(data); }
  char* payload() const { return data + sizeof(FrameHeader); }
  static LinkBuffer* of(void* context) { return static_cast<LinkBuffer*>(context); }
};

// Buffers that are made and released together.
class BufferBlock {
 public:
  BufferBlock(fid_domain* domain, bool registers, int count, int64_t bytes, OfiLink* link,
              LinkBuffer::Use use, void* owner);
  ~BufferBlock();
  BufferBlock(BufferBlock&& other) noexcept;
  BufferBlock(const BufferBlock&) = delete;

  LinkBuffer& operator[](size_t index) { return buffers_[index]; }
  std::vector<LinkBuffer>::iterator begin() { return buffers_.begin(); }
  std::vector<LinkBuffer>::iterator end() { return buffers_.end(); }
  LinkBuffer* find_idle() {
    for (LinkBuffer& buffer : buffers_) {
      if (!buffer.busy) return &buffer;
    }
    return nullptr;
  }

 private:
  char* memory_ = nullptr;
  int64_t bytes_ = 0;
  fid_mr* registration_ = nullptr;
  std::vector<LinkBuffer> buffers_;
};

class LinkBuffers {
 public:
  LinkBuffers(fid_domain* domain, bool registers) : domain_(domain), registers_(registers) {}
  BufferBlock make(int count, int64_t bytes, OfiLink* link, LinkBuffer::Use use,
                   void* owner = nullptr) {
    return BufferBlock(domain_, registers_, count, bytes, link, use, owner);
  }

 private:
  fid_domain* domain_;
  bool registers_;
};

}  // namespace jaxring
