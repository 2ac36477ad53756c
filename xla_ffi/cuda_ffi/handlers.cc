// Prepare asks XLA for the clique, Initialize (after XLA has let all ranks meet) sets up what is
// not yet there, Execute enqueues and returns.
//
// Operands: the order of the ordered call before, if there is one, and the packed leaves (of a
// barrier all leaves, as they are). Results: the order, the leaves. Nobody reads the order; see
// xla_ffi/ffi/handlers.cc.
#include "xla_ffi/cuda_ffi/handlers.h"

#include <optional>
#include <stdexcept>

#include "xla_ffi/cuda_ffi/call_site.h"
#include "xla_ffi/cuda_ffi/collectives_extension.h"

namespace jaxring::cuda {
namespace {

namespace ffi = xla::ffi;

// Runs f, which may throw, and makes of it what XLA takes.
template <class F>
ffi::Error guarded(F&& f) {
  try {
    f();
    return ffi::Error::Success();
  } catch (const Failed& failed) {
    return to_ffi(failed.error);
  } catch (const std::exception& exception) {
    Error error;
    error.message = exception.what();
    return to_ffi(error);
  }
}

void require(const Failure& failure) {
  if (failure) throw std::runtime_error(*failure);
}

// The host's chances to say that something went wrong on the device.
void require_sound(const CallSite& site) {
  if (std::optional<Error> error = site.failure()) throw Failed{*error};
}

class Leaves {
 public:
  Leaves(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results)
      : arguments_(arguments),
        results_(results),
        count_(results.size() - 1),
        first_argument_(arguments.size() - count_) {}
  size_t count() const { return count_; }
  ffi::AnyBuffer input(size_t leaf) const {
    return *arguments_.get<ffi::AnyBuffer>(first_argument_ + leaf);
  }
  ffi::AnyBuffer output(size_t leaf) const { return **results_.get<ffi::AnyBuffer>(1 + leaf); }
  void* order() const { return (*results_.get<ffi::AnyBuffer>(0))->untyped_data(); }

 private:
  const ffi::RemainingArgs& arguments_;
  const ffi::RemainingRets& results_;
  size_t count_;
  size_t first_argument_;
};

ffi::Error prepare(CallSite* site, Cliques cliques, ffi::Dictionary) {
  return guarded([&] {
    require_sound(*site);
    if (site->asks_for_cliques() && cliques.available()) require(cliques.request(site->groups()));
  });
}

ffi::Error initialize(CallSite* site, Cliques cliques, int32_t device, ffi::RemainingArgs arguments,
                      ffi::RemainingRets results, ffi::Dictionary) {
  return guarded([&] {
    require_sound(*site);
    const Leaves leaves(arguments, results);
    DType dtype = DType::kInt32;  // of a barrier, which is an allreduce of its order
    int64_t count = 1;
    if (!site->is_barrier()) {
      const std::optional<DType> known = dtype_of(leaves.input(0).element_type());
      if (!known) throw std::runtime_error("a leaf has a dtype that jaxring does not know");
      dtype = *known;
      count = static_cast<int64_t>(leaves.input(0).element_count());
    }
    site->initialize(cliques, device, dtype, count);
  });
}

// What a barrier is given it passes on; XLA usually gives both the same memory.
void pass_on(const Leaves& leaves, Stream stream) {
  for (size_t i = 0; i < leaves.count(); ++i) {
    const ffi::AnyBuffer from = leaves.input(i), to = leaves.output(i);
    if (from.untyped_data() == to.untyped_data() || from.size_bytes() == 0) continue;
    require(backend().runtime->copy(to.untyped_data(), from.untyped_data(),
                                    static_cast<int64_t>(from.size_bytes()), stream));
  }
}

ffi::Error execute(CallSite* site, Stream stream, int32_t device, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results, ffi::Dictionary) {
  return guarded([&] {
    const Place* place = site->place(device);
    if (place == nullptr) throw std::runtime_error("XLA ran a call that it had not initialized");
    if (std::optional<Error> error = place->seat->failure()) throw Failed{*error};
    const Leaves leaves(arguments, results);
    KernelCall call = place->call;
    if (site->is_barrier()) {
      pass_on(leaves, stream);
      require(backend().runtime->fill_zero(leaves.order(), sizeof(int32_t), stream));
      call.input = call.output = leaves.order();
    } else {
      call.input = leaves.input(0).untyped_data();
      call.output = leaves.output(0).untyped_data();
    }
    if (call.count > 0) require(place->seat->run(call, stream));
  });
}

}  // namespace
}  // namespace jaxring::cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxring_cuda_instantiate, jaxring::cuda::CallSite::create,
                              xla::ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxring_cuda_prepare, jaxring::cuda::prepare,
                              xla::ffi::Ffi::BindPrepare()
                                  .Ctx<xla::ffi::State<jaxring::cuda::CallSite>>()
                                  .Ctx<jaxring::cuda::CliquesIfAny>()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxring_cuda_initialize, jaxring::cuda::initialize,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::State<jaxring::cuda::CallSite>>()
                                  .Ctx<jaxring::cuda::CliquesIfAny>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

// Fit for command buffers (CUDA graphs): for one place it always enqueues the same operations with
// the same arguments, allocates nothing, waits for nothing, and counts nothing on the host. What
// changes from call to call (epochs) stands in the arena.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxring_cuda_execute, jaxring::cuda::execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::State<jaxring::cuda::CallSite>>()
                                  .Ctx<xla::ffi::PlatformStream<jaxring::cuda::Stream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
