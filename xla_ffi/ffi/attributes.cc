#include "xla_ffi/ffi/attributes.h"

#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/core/text.h"

namespace jaxring {

namespace ffi = xla::ffi;

namespace {

template <typename Value>
Value known(std::optional<Value> value, const char* what, const std::string& name) {
  if (!value) throw std::runtime_error("unknown " + std::string(what) + " '" + name + "'");
  return *value;
}

// "reduce(sum, root=1, float32[3,4], algorithm=auto)"
std::string signature_text(const CallInfo& info, const std::string& shapes) {
  std::string text = std::string(name_of(info.collective)) + "(";
  if (info.collective == Collective::kBarrier) return text + info.layout + ")";  // no data, no way
  if (reduces(info.collective)) text += std::string(name_of(info.op)) + ", ";
  if (info.collective == Collective::kBroadcast || info.collective == Collective::kReduce) {
    text += "root=" + std::to_string(info.root) + ", ";
  }
  if (info.collective == Collective::kPermute) {
    text += "perm=[";
    for (size_t rank = 0; rank < info.destinations.size(); ++rank) {
      if (info.destinations[rank] < 0) continue;
      text += std::to_string(rank) + "->" + std::to_string(info.destinations[rank]) + " ";
    }
    if (text.back() == ' ') text.pop_back();
    text += "], ";
  }
  text += shapes + (info.layout.empty() ? "" : ", " + info.layout) +
          ", algorithm=" + std::string(info_of(info.algorithm).name);
  if (info.deterministic) text += ", deterministic";
  if (info.chunk_bytes > 0) text += ", chunk_bytes=" + std::to_string(info.chunk_bytes);
  return text + ")";
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

}  // namespace

std::string text_attribute(ffi::Dictionary attributes, const char* name) {
  return std::string(attribute<std::string_view>(attributes, name));
}

std::vector<int64_t> numbers_attribute(ffi::Dictionary attributes, const char* name) {
  const auto span = attribute<ffi::Span<const int64_t>>(attributes, name);
  return std::vector<int64_t>(span.begin(), span.end());
}

CallAttributes::CallAttributes(ffi::Dictionary attributes)
    : module(text_attribute(attributes, "module")),
      call(static_cast<uint32_t>(attribute<int64_t>(attributes, "call"))),
      ordered(attribute<bool>(attributes, "ordered")),
      communicator(text_attribute(attributes, "communicator")),
      device_ids(numbers_attribute(attributes, "device_ids")),
      processes(numbers_attribute(attributes, "processes")) {
  const std::vector<int64_t> members = numbers_attribute(attributes, "group_members");
  size_t next = 0;
  for (int64_t size : numbers_attribute(attributes, "group_sizes")) {
    if (size < 0 || size > static_cast<int64_t>(members.size() - next)) {
      throw std::runtime_error("group_sizes and group_members don't fit each other");
    }
    groups.emplace_back(members.begin() + next, members.begin() + next + size);
    next += size;
  }
  const std::string collective = text_attribute(attributes, "collective");
  const std::string op = text_attribute(attributes, "op");
  const std::string algorithm = text_attribute(attributes, "algorithm");
  info.collective = known(collective_from_name(collective), "collective", collective);
  if (reduces(info.collective)) info.op = known(reduce_op_from_name(op), "op", op);
  info.algorithm = known(algorithm_from_name(algorithm), "algorithm", algorithm);
  info.chunk_bytes = attribute<int64_t>(attributes, "chunk_bytes");
  info.deterministic = attribute<bool>(attributes, "deterministic");
  info.root = static_cast<int>(attribute<int64_t>(attributes, "root"));
  for (int64_t destination : numbers_attribute(attributes, "permutation")) {
    info.destinations.push_back(static_cast<int>(destination));
  }
  info.name = on_one_line(text_attribute(attributes, "name"));
  info.layout = text_attribute(attributes, "layout");
}

std::string CallAttributes::key_of_group(const std::vector<int64_t>& partitions) const {
  // Without a concrete mesh, partitions stand for devices: all of them are of this process then.
  std::string key = device_ids.empty() ? "partitions:" : "mesh:";
  for (size_t i = 0; i < partitions.size(); ++i) {
    const int64_t partition = partitions[i];
    if (!device_ids.empty() && partition >= static_cast<int64_t>(device_ids.size())) {
      throw std::runtime_error("a group names partition " + std::to_string(partition) +
                               ", but the mesh has " + std::to_string(device_ids.size()));
    }
    key +=
        (i > 0 ? "," : "") + std::to_string(device_ids.empty() ? partition : device_ids[partition]);
  }
  return key;
}

CallInfo complete(CallInfo info, DType dtype, const std::string& shapes) {
  info.dtype = dtype;
  // A copy goes through the same fold, whatever its op, as long as the op has a meaning.
  if (!reduces(info.collective)) info.op = dtype == DType::kBool ? ReduceOp::kOr : ReduceOp::kSum;
  info.signature = Signature(signature_text(info, shapes));
  return info;
}

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

ffi::Error to_ffi(const Error& error) {
  Registry::instance().remember(error);
  return ffi::Error(code_of(error.kind), error.text());
}

}  // namespace jaxring
