// How the two ends of a connection come to know each other: a challenge each way, so that neither
// a stranger nor a replay passes.
//
//   connector                             listener
//   kHello(processes, nonce a)      ->
//                                   <-    kChallenge(nonce b, proof "listener")
//   kProof(proof "connector")       ->
//
// proof = HMAC-SHA256(secret, role, communicator, processes, both nonces)
#if JAXRING_HAS_LIBFABRIC
#include <unistd.h>

#include <algorithm>

#include "xla_ffi/transport/ofi_link.h"

namespace jaxring {

Digest OfiLink::proof(const char* role, int from, int to) const {
  const uint8_t* a = connector_ ? nonce_ : peer_nonce_;
  const uint8_t* b = connector_ ? peer_nonce_ : nonce_;
  std::string text = std::string(kLinkMagic) + '\0' + role + '\0' + home_.spec.name + '\0' +
                     std::to_string(from) + ' ' + std::to_string(to) + '\0';
  text.append(reinterpret_cast<const char*>(a), sizeof nonce_);
  text.append(reinterpret_cast<const char*>(b), sizeof nonce_);
  return hmac_sha256(home_.spec.secret, text);
}

void OfiLink::fill(Introduction* introduction, const char* role) const {
  *introduction = Introduction{};
  std::memcpy(introduction->magic, kLinkMagic, sizeof introduction->magic);
  introduction->from_process = home_.spec.self_process;
  introduction->to_process = process_;
  introduction->pid = getpid();
  std::memcpy(introduction->nonce, nonce_, sizeof nonce_);
  if (role != nullptr) {
    const Digest digest = proof(role, home_.spec.self_process, process_);
    std::copy(digest.begin(), digest.end(), introduction->proof);
  }
  gethostname(introduction->host, sizeof introduction->host - 1);
}

bool OfiLink::is_proven(const Introduction& introduction, const char* role) const {
  Digest digest;
  std::copy(std::begin(introduction.proof), std::end(introduction.proof), digest.begin());
  return equal_digests(digest, proof(role, process_, home_.spec.self_process));
}

bool OfiLink::send_introduction(FrameKind kind, const char* role) {
  LinkBuffer* buffer = control_slots_.find_idle();
  if (buffer == nullptr) return false;
  buffer->header() = FrameHeader{};
  buffer->header().kind = kind;
  buffer->header().payload_bytes = sizeof(Introduction);
  fill(reinterpret_cast<Introduction*>(buffer->payload()), role);
  return send(*buffer);
}

// False for whatever one who knows the secret would not have said.
bool OfiLink::introduce(FrameKind kind, LinkBuffer& buffer) {
  if (buffer.header().payload_bytes != sizeof(Introduction)) return false;
  Introduction theirs;
  std::memcpy(&theirs, buffer.payload(), sizeof theirs);
  theirs.host[sizeof theirs.host - 1] = '\0';
  if (std::memcmp(theirs.magic, kLinkMagic, sizeof theirs.magic) != 0 ||
      theirs.to_process != home_.spec.self_process) {
    return false;
  }
  if (kind == FrameKind::kHello && !connector_ && process_ < 0) {
    const int from = theirs.from_process;
    if (from <= home_.spec.self_process || from >= home_.spec.process_count() ||
        !home_.spec.is_remote(from)) {
      return false;
    }
    process_ = from;  // so far it only says so
    std::memcpy(peer_nonce_, theirs.nonce, sizeof peer_nonce_);
    return send_introduction(FrameKind::kChallenge, "listener");
  }
  if (theirs.from_process != process_) return false;
  if (kind == FrameKind::kChallenge && connector_) {
    std::memcpy(peer_nonce_, theirs.nonce, sizeof peer_nonce_);
    if (!is_proven(theirs, "listener")) return false;
    return send_introduction(FrameKind::kProof, "connector") && take_over(theirs);
  }
  if (kind == FrameKind::kProof && !connector_) {
    return is_proven(theirs, "connector") && take_over(theirs);
  }
  return false;
}

// From here on it is the link to that process.
bool OfiLink::take_over(const Introduction& introduction) {
  OfiLink* nobody = connector_ ? this : nullptr;
  if (!home_.by_process[process_].compare_exchange_strong(nobody, this)) return false;
  host_ = introduction.host;
  pid_.store(introduction.pid, std::memory_order_release);
  state_.store(kReady, std::memory_order_release);
  return true;
}

}  // namespace jaxring
#endif
