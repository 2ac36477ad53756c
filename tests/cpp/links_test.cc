// Connections between hosts: who is let in, what strangers can do, what arrives when one goes.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#include "world.h"
#include "xla_ffi/core/sha256.h"
#if JAXRING_HAS_LIBFABRIC
#include "xla_ffi/transport/link_fifo.h"
#endif

#ifdef __SANITIZE_ADDRESS__
// A listener of libfabric's that closes forgets the strangers who had not said all of their request
// to connect (its xnet_pep_close): some hundred bytes each. Visible, as the sanitizer looks for it.
extern "C" [[gnu::visibility("default")]] const char* __lsan_default_suppressions() {
  return "leak:libfabric";
}
#endif

namespace {
std::atomic<size_t> exhausted_bytes{0};  // allocations of this size fail; 0: none
}

// The program's own, for the tests of what happens when there is no memory. Inlined, GCC would take
// free() for a mistake.
[[gnu::noinline]] void* operator new(size_t bytes) {
  const bool exhausted = bytes > 0 && bytes == exhausted_bytes.load();
  void* memory = exhausted ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace jaxring::testing {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  char byte[3];
  for (uint8_t b : digest) text += (std::snprintf(byte, sizeof byte, "%02x", b), byte);
  return text;
}

TEST(Sha256, KnownAnswers) {  // FIPS 180-4's examples
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Hmac, KnownAnswers) {  // RFC 4231, cases 1, 2 and 6
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

#if JAXRING_HAS_LIBFABRIC

// Two processes on two hosts, not yet connected.
class Pair {
 public:
  explicit Pair(const std::string& second_secret = "secret") {
    for (int process = 0; process < 2; ++process) {
      CommunicatorSpec spec;
      spec.key = "pair";
      spec.processes = {0, 1};
      spec.self_process = process;
      ends.push_back(std::make_unique<Communicator>(spec));
      addresses.push_back(
          ends.back()->listen({0, 1}, "tcp", "127.0.0.1", process == 0 ? "secret" : second_secret));
      ends.back()->attach(Segment::create(2, 2));
    }
  }
  void connect() {
    for (auto& end : ends) end->connect(addresses);
  }
  bool attached_within(std::chrono::milliseconds at_most) const {
    const auto deadline = Clock::now() + at_most;
    while (!ends[0]->all_attached() || !ends[1]->all_attached()) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  // An allreduce of `count` on both; the errors' texts.
  std::vector<std::string> reduce(int64_t count, uint64_t run_id) {
    std::vector<std::string> texts(2);
    const auto info = make_info(Algorithm::kRing, ReduceOp::kSum, DType::kFloat32, count);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        std::vector<float> in(count, static_cast<float>(rank + 1)), out(count);
        Request request;
        request.info = info;
        request.rank = rank;
        request.run_id = run_id;
        request.input.add(in.data(), count);
        request.output.add(out.data(), count);
        const auto error = Submitted::start(*ends[rank], std::move(request)).error();
        if (error) texts[rank] = error->text();
        const bool right = std::all_of(out.begin(), out.end(), [](float x) { return x == 3; });
        if (!error && !right) texts[rank] = "wrong values";
      });
    }
    for (std::thread& thread : threads) thread.join();
    return texts;
  }

  std::vector<std::unique_ptr<Communicator>> ends;
  std::vector<std::string> addresses;
};

constexpr auto kLong = std::chrono::seconds(20);

TEST(Links, ConnectAndCarry) {
  Pair pair;
  pair.connect();
  ASSERT_TRUE(pair.attached_within(kLong));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pair.reduce(300000, i + 1), (std::vector<std::string>{"", ""}));
  }
}

TEST(Links, AnotherSecretIsNotLetIn) {
  Pair pair("another");
  pair.connect();
  EXPECT_FALSE(pair.attached_within(std::chrono::seconds(1)));
}

// Of a raw TCP connection to where a process listens.
class Stranger {
 public:
  explicit Stranger(const std::string& address) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.find(' ')))));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(0, ::connect(fd_, reinterpret_cast<sockaddr*>(&where), sizeof where));
  }
  ~Stranger() { close(fd_); }
  void say(const std::string& text) {
    [[maybe_unused]] const ssize_t sent = send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
  }

 private:
  const int fd_;
};

TEST(Links, StrangersDoNoHarm) {
  Pair pair;
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 20; ++i) {
    strangers.push_back(std::make_unique<Stranger>(pair.addresses[i % 2]));
    std::string noise(i * 37, static_cast<char>(i));
    if (i % 3 == 1) noise = std::string(4096, '\xff');
    strangers.back()->say(noise);  // some say nothing at all
    if (i % 4 == 3) strangers.pop_back();
  }
  pair.connect();
  ASSERT_TRUE(pair.attached_within(kLong));
  strangers.push_back(std::make_unique<Stranger>(pair.addresses[0]));
  strangers.back()->say("GET / HTTP/1.0\r\n\r\n");
  EXPECT_EQ(pair.reduce(100000, 1), (std::vector<std::string>{"", ""}));
}

// What the first to go had still to send arrives, and its going is no error.
TEST(Links, OneThatLeavesHasGivenItsPart) {
  for (uint64_t i = 1; i <= 5; ++i) {
    Pair pair;
    pair.connect();
    ASSERT_TRUE(pair.attached_within(kLong));
    EXPECT_EQ(pair.reduce(500000, 1), (std::vector<std::string>{"", ""}));
    const auto begin = Clock::now();
    pair.ends[0].reset();
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(3));
  }
}

// While `bytes` are asked for in one piece.
struct NoMemoryFor {
  explicit NoMemoryFor(size_t bytes) { exhausted_bytes = bytes; }
  ~NoMemoryFor() { exhausted_bytes = 0; }
};

// The thread of the links learns of a FIFO by its peer's grant, and makes its end of it.
TEST(Links, NoMemoryInTheirThreadFailsThemAndEndsTheConnection) {
  struct Side {
    explicit Side(int process) {
      LinksSpec spec;
      spec.name = "alone";
      spec.processes = spec.hosts = {0, 1};
      spec.self_process = process;
      spec.provider = "tcp";
      spec.interface = "127.0.0.1";
      spec.secret = "secret";
      links = make_links(spec);
      links->bind(segment->record_ring(process),
                  {&segment->cursor(0, process), &segment->cursor(1, process)}, [] {});
    }
    std::shared_ptr<Segment> segment = Segment::create(2, 2);
    std::unique_ptr<Links> links;
  };
  Side sides[] = {Side(0), Side(1)};
  const std::vector<std::string> addresses = {sides[0].links->address(), sides[1].links->address()};
  for (Side& side : sides) side.links->connect(addresses);
  auto waited_for = [](auto&& condition) {
    const auto deadline = Clock::now() + kLong;
    while (!condition() && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return condition();
  };
  ASSERT_TRUE(
      waited_for([&] { return sides[0].links->connected(1) && sides[1].links->connected(0); }));
  {
    NoMemoryFor senders(sizeof(LinkSender));
    sides[1].links->receiver(0, 1, 0);
    EXPECT_TRUE(waited_for([&] { return !sides[0].links->failure().empty(); }));
  }
  EXPECT_EQ(sides[0].links->failure(), "std::bad_alloc");
  EXPECT_TRUE(waited_for([&] { return sides[1].links->is_dead(0); }));
  EXPECT_EQ(sides[1].links->failure(), "");
}

TEST(Links, NoMemoryForThemIsAnErrorOnBothSides) {
  for (size_t bytes : {sizeof(LinkSender), sizeof(LinkReceiver)}) {
    Pair pair;
    pair.connect();
    ASSERT_TRUE(pair.attached_within(kLong));
    NoMemoryFor ends(bytes);
    for (const std::string& text : pair.reduce(300000, 1)) {
      EXPECT_NE(text.find("Error"), std::string::npos) << text;
    }
    const std::string text = pair.ends[0]->broken()->text() + pair.ends[1]->broken()->text();
    EXPECT_NE(text.find("to other hosts have failed there (std::bad_alloc)"), std::string::npos)
        << text;
  }
}

#endif

}  // namespace
}  // namespace jaxring::testing
