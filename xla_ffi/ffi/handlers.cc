// Buffers and attributes -> Request; Error -> ffi::Error. Nothing else happens here.
#include "xla_ffi/ffi/handlers.h"

#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/completer.h"

namespace jaxring {
namespace {

namespace ffi = xla::ffi;

std::optional<DType> dtype_of(ffi::DataType type) {
  switch (type) {
#define JR_X(ffi_name, dtype)   \
  case ffi::DataType::ffi_name: \
    return DType::dtype;
    JR_X(PRED, kBool)
    JR_X(S8, kInt8)
    JR_X(S16, kInt16)
    JR_X(S32, kInt32)
    JR_X(S64, kInt64)
    JR_X(U8, kUInt8)
    JR_X(U16, kUInt16)
    JR_X(U32, kUInt32)
    JR_X(U64, kUInt64)
    JR_X(F16, kFloat16)
    JR_X(BF16, kBFloat16)
    JR_X(F32, kFloat32)
    JR_X(F64, kFloat64)
    JR_X(C64, kComplex64)
    JR_X(C128, kComplex128)
    JR_X(F8E3M4, kFloat8E3M4)
    JR_X(F8E4M3, kFloat8E4M3)
    JR_X(F8E4M3FN, kFloat8E4M3Fn)
    JR_X(F8E4M3FNUZ, kFloat8E4M3Fnuz)
    JR_X(F8E4M3B11FNUZ, kFloat8E4M3B11Fnuz)
    JR_X(F8E5M2, kFloat8E5M2)
    JR_X(F8E5M2FNUZ, kFloat8E5M2Fnuz)
#undef JR_X
    default:
      return std::nullopt;
  }
}

ffi::ErrorCode code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsageError:
      return ffi::ErrorCode::kInvalidArgument;
    case ErrorKind::kMismatchError:
      return ffi::ErrorCode::kFailedPrecondition;
    case ErrorKind::kTimeoutError:
      return ffi::ErrorCode::kDeadlineExceeded;
    case ErrorKind::kPeerError:
      return ffi::ErrorCode::kUnavailable;
    case ErrorKind::kAbortedError:
      return ffi::ErrorCode::kAborted;
  }
  return ffi::ErrorCode::kInternal;
}

ffi::Error to_ffi(const Error& error) {
  Registry::instance().remember(error);
  return ffi::Error(code_of(error.kind), error.text());
}

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
Request make_request(CallSite& site, int rank, const ffi::RunId& run_id, int device_ordinal,
                     ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  Request request;
  DType dtype = DType::kFloat32;
  const size_t first_result = site.ordered() ? 1 : 0;
  const size_t leaf_count = results.size() - first_result;
  const size_t first_argument = arguments.size() - leaf_count;
  if (site.ordered()) *(*results.get<ffi::AnyBuffer>(0))->typed_data<int32_t>() = 0;
  for (size_t leaf = 0; leaf < leaf_count; ++leaf) {
    const ffi::AnyBuffer input = *arguments.get<ffi::AnyBuffer>(first_argument + leaf);
    ffi::Result<ffi::AnyBuffer> output = *results.get<ffi::AnyBuffer>(first_result + leaf);
    const std::optional<DType> known = dtype_of(input.element_type());
    if (!known) throw std::runtime_error("a leaf has a dtype that jaxring does not know");
    dtype = *known;
    request.input.add(input.untyped_data(), input.element_count());
    request.output.add(output->untyped_data(), output->element_count());
  }
  request.info = site.info(dtype, [&] {
    std::string text;
    for (size_t leaf = 0; leaf < leaf_count; ++leaf) {
      const ffi::AnyBuffer input = *arguments.get<ffi::AnyBuffer>(first_argument + leaf);
      text += (leaf > 0 ? " " : "") + shape_of(input, dtype);
    }
    return text;
  });
  request.rank = rank;
  request.run_id = run_id.run_id;
  request.call = site.call();
  request.copy = site.copy();
  request.iteration = site.next_iteration(device_ordinal, request.run_id);
  return request;
}

ffi::Future execute(CallSite* site, ffi::RunId run_id, int32_t device_ordinal,
                    ffi::RemainingArgs arguments, ffi::RemainingRets results, ffi::Dictionary) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    const int partition = *arguments.get<ffi::AnyBuffer>(0)->typed_data<int32_t>();
    const CallSite::Place place = site->place_of(partition);
    auto outcome = place.communicator->submit(
        make_request(*site, place.rank, run_id, device_ordinal, arguments, results),
        [&]() -> Completion {
          return [promise, device_ordinal](std::optional<Error> error) mutable {
            Completer::of_device(device_ordinal).post([promise, error]() mutable {
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
