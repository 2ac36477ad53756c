// Buffers and attributes -> Request; Error -> ffi::Error. Nothing else happens here.
#include "xla_ffi/ffi/handlers.h"

#include <cstring>

#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/completer.h"
#include "xla_ffi/host/huge_pages.h"

namespace jaxring {
namespace {

namespace ffi = xla::ffi;

std::string shape_of(const ffi::AnyBuffer& buffer, DType dtype) {
  std::string text = std::string(name_of(dtype)) + "[";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(buffer.dimensions()[i]);
  }
  return text + "]";
}

// Operands: the partition id, the order of the call before (of an ordered call that is not the
// first), the leaves. Results: the order (of an ordered call), the leaves. The order is a scalar
// without meaning; passing it on keeps XLA from exchanging two calls.
class CallLeaves {
 public:
  CallLeaves(const CallSite& site, const ffi::RemainingArgs& arguments,
             const ffi::RemainingRets& results)
      : arguments_(arguments),
        results_(results),
        first_result_(site.ordered() ? 1 : 0),
        count_(results.size() - first_result_),
        first_argument_(arguments.size() - count_) {}
  size_t count() const { return count_; }
  ffi::AnyBuffer input(size_t leaf) const {
    return *arguments_.get<ffi::AnyBuffer>(first_argument_ + leaf);
  }
  ffi::AnyBuffer output(size_t leaf) const {
    return **results_.get<ffi::AnyBuffer>(first_result_ + leaf);
  }

 private:
  const ffi::RemainingArgs& arguments_;
  const ffi::RemainingRets& results_;
  size_t first_result_;
  size_t count_;
  size_t first_argument_;
};

DType dtype_of_leaf(const ffi::AnyBuffer& buffer) {
  const std::optional<DType> known = dtype_of(buffer.element_type());
  if (!known) throw std::runtime_error("a leaf has a dtype that jaxring does not know");
  return *known;
}

// Adds the parts of a rank's operands or results to a message in its order: block by block, in each
// of them leaf by leaf.
template <class Pointer, class GetBuffer>
void add_blocks(Leaves<Pointer>& leaves, size_t leaf_count, int64_t blocks, int64_t element_bytes,
                GetBuffer get) {
  if (leaf_count == 1) return leaves.add(get(0).untyped_data(), get(0).element_count());
  for (int64_t block = 0; block < blocks; ++block) {
    for (size_t leaf = 0; leaf < leaf_count; ++leaf) {
      const int64_t count = static_cast<int64_t>(get(leaf).element_count()) / blocks;
      leaves.add(static_cast<char*>(get(leaf).untyped_data()) + block * count * element_bytes,
                 count);
    }
  }
}

// A program carries the world size it was traced for where shapes depend on it; a world may have
// changed since.
void check_world(const CallInfo& info, const CallLeaves& leaves, int world_size) {
  for (size_t i = 0; i < leaves.count(); ++i) {
    const int64_t in = leaves.input(i).element_count(), out = leaves.output(i).element_count();
    const bool gathers = info.collective == Collective::kAllGather;
    const bool scatters = info.collective == Collective::kReduceScatter;
    const bool exchanges = info.collective == Collective::kAllToAll;
    const ffi::AnyBuffer whole = gathers ? leaves.output(i) : leaves.input(i);
    const int64_t ranks = gathers || scatters || exchanges
                              ? (whole.dimensions().size() > 0 ? whole.dimensions()[0] : 0)
                              : world_size;
    if (ranks != world_size ||
        out * (scatters ? world_size : 1) != in * (gathers ? world_size : 1)) {
      throw std::runtime_error(info.label() + ": the program was traced for " +
                               std::to_string(ranks) + " ranks, but there are " +
                               std::to_string(world_size) + "; jit it again");
    }
  }
  const int permuted = static_cast<int>(info.destinations.size());
  const bool permutes = info.collective == Collective::kPermute;
  if (info.root < 0 || info.root >= world_size || (permutes && permuted != world_size)) {
    throw std::runtime_error(info.label() + ": names ranks that a world of " +
                             std::to_string(world_size) + " doesn't have; jit it again");
  }
}

void add_leaves(Request& request, const CallLeaves& leaves, int world_size) {
  const CallInfo& info = *request.info;
  const int64_t element_bytes = size_of(info.dtype);
  const bool all_in =
      info.collective == Collective::kReduceScatter || info.collective == Collective::kAllToAll;
  const bool all_out =
      info.collective == Collective::kAllGather || info.collective == Collective::kAllToAll;
  add_blocks(request.input, leaves.count(), all_in ? world_size : 1, element_bytes,
             [&](size_t i) { return leaves.input(i); });
  for (size_t i = 0; i < leaves.count(); ++i) {
    const ffi::AnyBuffer output = leaves.output(i);
    if (output.untyped_data() == leaves.input(i).untyped_data()) continue;  // touched already
    prefer_huge_pages(output.untyped_data(), static_cast<int64_t>(output.size_bytes()));
  }
  add_blocks(request.output, leaves.count(), all_out ? world_size : 1, element_bytes,
             [&](size_t i) { return leaves.output(i); });
  const Range message = request.message();
  request.input.begin_at(input_range(info.collective, message, world_size, request.rank).offset);
  request.output.begin_at(output_range(info.collective, message, world_size, request.rank).offset);
}

// What a barrier is given it passes on; XLA usually gives both the same memory.
void pass_on(const CallLeaves& leaves) {
  for (size_t i = 0; i < leaves.count(); ++i) {
    const ffi::AnyBuffer from = leaves.input(i), to = leaves.output(i);
    if (from.untyped_data() != to.untyped_data() && from.size_bytes() > 0) {
      std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
    }
  }
}

CallSite::Visit visit(CallSite& site, const ffi::RunId& run_id, int device_ordinal,
                      const CallLeaves& leaves, int partition) {
  const bool is_barrier = site.collective() == Collective::kBarrier;
  const DType dtype =
      leaves.count() == 0 || is_barrier ? DType::kInt8 : dtype_of_leaf(leaves.input(0));
  return site.visit(partition, device_ordinal, run_id.run_id, dtype, [&] {
    std::string text;
    for (size_t leaf = 0; leaf < leaves.count() && !is_barrier; ++leaf) {
      text += (leaf > 0 ? " " : "") + shape_of(leaves.input(leaf), dtype);
    }
    return text;
  });
}

Request make_request(CallSite& site, CallSite::Visit& visit, const ffi::RunId& run_id,
                     const CallLeaves& leaves) {
  Request request;
  request.info = std::move(visit.info);
  request.rank = visit.rank;
  request.run_id = run_id.run_id;
  request.call = site.call();
  request.copy = site.copy();
  request.iteration = visit.iteration;
  if (site.collective() == Collective::kBarrier) {
    pass_on(leaves);
  } else {
    const int world_size = visit.communicator->spec().world_size();
    check_world(*request.info, leaves, world_size);
    add_leaves(request, leaves, world_size);
  }
  return request;
}

ffi::Future execute(CallSite* site, ffi::RunId run_id, int32_t device_ordinal,
                    ffi::RemainingArgs arguments, ffi::RemainingRets results, ffi::Dictionary) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    const int partition = *arguments.get<ffi::AnyBuffer>(0)->typed_data<int32_t>();
    if (site->ordered()) *(*results.get<ffi::AnyBuffer>(0))->typed_data<int32_t>() = 0;
    const CallLeaves leaves(*site, arguments, results);
    CallSite::Visit here = visit(*site, run_id, device_ordinal, leaves, partition);
    auto outcome =
        here.communicator->submit(make_request(*site, here, run_id, leaves), [&]() -> Completion {
          // Made here, where it can be told if there is no thread for it.
          Completer& completer = Completer::of_device(device_ordinal);
          return [promise, &completer](std::optional<Error> error) mutable {
            completer.post([promise, error]() mutable {
              if (error) {
                promise.SetError(to_ffi(*error));
              } else {
                promise.SetAvailable();
              }
            });
          };
        });
    if (!outcome) return future;  // handed over
    if (*outcome) {
      promise.SetError(to_ffi(**outcome));
    } else {
      promise.SetAvailable();
    }
  } catch (const std::exception& exception) {
    Error error;
    error.message = exception.what();
    promise.SetError(to_ffi(error));
  }
  return future;
}

}  // namespace
}  // namespace jaxring

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxring_instantiate, jaxring::CallSite::create,
                              xla::ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxring_execute, jaxring::execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::State<jaxring::CallSite>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());
