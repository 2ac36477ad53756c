// XLA as a handler sees it: call frames, a context, and the Collectives extension in any version.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/cuda_ffi/collectives_extension.h"

// What XLA keeps behind these names, here.
struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};

struct XLA_FFI_ExecutionContext {
  void* state = nullptr;
  void* stream = nullptr;
  int32_t device = 0;
  const jaxring::cuda::abi::CollectivesExtension* extension = nullptr;
};

namespace jaxring::fake_xla {

namespace abi = jaxring::cuda::abi;

// The structure that XLA hands over; an older one ends before the tail.
struct Api {
  XLA_FFI_Api api{};
  abi::ApiTail tail{};

  explicit Api(bool has_extensions) {
    api.struct_size = has_extensions ? sizeof(Api) : sizeof(XLA_FFI_Api);
    api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message, args->errc};
    };
    api.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    api.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
      args->ctx->state = args->state;
      return nullptr;
    };
    api.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = args->ctx->state;
      return nullptr;
    };
    api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
      args->stream = args->ctx->stream;
      return nullptr;
    };
    api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = args->ctx->device;
      return nullptr;
    };
    tail.find_extension = [](abi::FindExtensionArgs* args) -> XLA_FFI_Error* {
      args->found = args->type == abi::kCollectivesType && args->context->extension != nullptr
                        ? &args->context->extension->header
                        : nullptr;
      return nullptr;
    };
  }
};

// Attributes as XLA lays them out: sorted by name, which std::map does.
class Attributes {
 public:
  void text(const std::string& name, const std::string& value) { texts_[name] = value; }
  void number(const std::string& name, int64_t value) { numbers_[name] = value; }
  void flag(const std::string& name, bool value) { flags_[name] = value; }
  void numbers(const std::string& name, std::vector<int64_t> value) {
    arrays_[name] = std::move(value);
  }

  // Valid until the next call or change.
  XLA_FFI_Attrs view() {
    entries_.clear();
    for (auto& [name, value] : texts_) {
      add(name, XLA_FFI_AttrType_STRING, XLA_FFI_ByteSpan{value.data(), value.size()});
    }
    for (auto& [name, value] : numbers_) {
      add(name, XLA_FFI_AttrType_SCALAR, XLA_FFI_Scalar{XLA_FFI_DataType_S64, &value});
    }
    for (auto& [name, value] : flags_) {
      add(name, XLA_FFI_AttrType_SCALAR, XLA_FFI_Scalar{XLA_FFI_DataType_PRED, &value});
    }
    for (auto& [name, value] : arrays_) {
      add(name, XLA_FFI_AttrType_ARRAY,
          XLA_FFI_Array{XLA_FFI_DataType_S64, value.size(), value.data()});
    }
    types_.clear();
    names_.clear();
    values_.clear();
    for (auto& [name, entry] : entries_) {
      entry.name = {name.data(), name.size()};
      types_.push_back(entry.type);
      names_.push_back(&entry.name);
      values_.push_back(entry.value.get());
    }
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(types_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  struct Entry {
    XLA_FFI_AttrType type;
    XLA_FFI_ByteSpan name;
    std::shared_ptr<void> value;
  };
  template <typename T>
  void add(const std::string& name, XLA_FFI_AttrType type, T value) {
    entries_[name] = Entry{type, {}, std::make_shared<T>(value)};
  }

  std::map<std::string, std::string> texts_;
  std::map<std::string, int64_t> numbers_;
  std::map<std::string, bool> flags_;
  std::map<std::string, std::vector<int64_t>> arrays_;
  std::map<std::string, Entry> entries_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
};

struct Buffer {
  XLA_FFI_DataType dtype;
  void* data;
  std::vector<int64_t> dims;
};

// Calls a handler; "" or the text of its error.
inline std::string call(XLA_FFI_Handler* handler, const Api& api, XLA_FFI_ExecutionContext* context,
                        XLA_FFI_ExecutionStage stage, Attributes attributes,
                        std::vector<Buffer> arguments = {}, std::vector<Buffer> results = {}) {
  std::vector<XLA_FFI_Buffer> buffers;
  buffers.reserve(arguments.size() + results.size());
  std::vector<void*> argument_pointers, result_pointers;
  const auto add = [&](std::vector<Buffer>& from, std::vector<void*>& to) {
    for (Buffer& buffer : from) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, buffer.dtype, buffer.data,
                         static_cast<int64_t>(buffer.dims.size()), buffer.dims.data()});
      to.push_back(&buffers.back());
    }
  };
  add(arguments, argument_pointers);
  add(results, result_pointers);
  std::vector<XLA_FFI_ArgType> argument_types(arguments.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api.api;
  frame.ctx = context;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(arguments.size()),
                argument_types.data(), argument_pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()),
                result_types.data(), result_pointers.data()};
  frame.attrs = attributes.view();
  std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  return error ? error->message : "";
}

// The handler's traits, as XLA asks for them.
inline uint32_t traits_of(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
                              nullptr};
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  handler(&frame);
  return metadata.traits;
}

// The extension: remembers what was requested, and gives each device its communicator.
struct Collectives {
  abi::CollectivesExtension extension{};
  std::vector<std::vector<int64_t>> requested;
  int64_t requested_id = -1;
  void* communicator = nullptr;

  explicit Collectives(int32_t minor, int32_t major = 0) {
    extension.header = {
        sizeof(abi::CollectivesExtension), {abi::kCollectivesType, major, minor}, nullptr};
    extension.state = this;
    extension.request_communicator = [](const abi::CollectivesExtension* self,
                                        abi::RequestArgs* args) -> XLA_FFI_Error* {
      auto* state = static_cast<Collectives*>(self->state);
      if (args->group_mode != abi::kGroupsOfFlattenedIds) {
        return new XLA_FFI_Error{"wrong group mode", XLA_FFI_Error_Code_INVALID_ARGUMENT};
      }
      state->requested_id = args->communication_id;
      state->requested.clear();
      for (size_t i = 0; i < args->group_count; ++i) {
        state->requested.emplace_back(args->groups[i].ids,
                                      args->groups[i].ids + args->groups[i].size);
      }
      return nullptr;
    };
    extension.get_communicator = [](const abi::CollectivesExtension* self,
                                    abi::GetArgs* args) -> XLA_FFI_Error* {
      auto* state = static_cast<Collectives*>(self->state);
      if (state->requested.empty() || args->communication_id != state->requested_id) {
        return new XLA_FFI_Error{"the clique was not requested",
                                 XLA_FFI_Error_Code_FAILED_PRECONDITION};
      }
      args->communicator = state->communicator;
      return nullptr;
    };
  }
};

}  // namespace jaxring::fake_xla
