#include <ATen/core/ivalue.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/text.h"
#include "comm/group/group.h"
#include "comm/object_bytes.h"
#include "comm/strings.h"

// A rank whose object cannot be sent takes part in the collective with the reason instead, so that no rank waits for it
// and all ranks that were to receive the object throw the same error.

namespace lockstep {
namespace {

constexpr char kObject = 'O', kReason = 'E';

std::string object_message(const c10::IValue& object) {
  try {
    return kObject + to_bytes(object);
  } catch (const ObjectError& error) {
    return kReason + std::string(error.what());
  }
}

/// Returns the object in a message of rank `sender`.
c10::IValue object_in(const std::string& message, int sender, const ProcessGroup& group, const char* call) {
  if (message.starts_with(kReason))
    throw UsageError(sender, text(call, ": ", message.substr(1),
                                  "; use strings, numbers, CPU tensors, or lists, tuples and dictionaries of them"));
  try {
    if (!message.starts_with(kObject)) throw ObjectError("malformed object: it has no type");
    return from_bytes(std::string_view(message).substr(1));
  } catch (const ObjectError& error) {
    throw MismatchError(group.rank(), text(call, ": rank ", sender, " sent a ", error.what(),
                                           "; use the same version of lockstep on all ranks"));
  }
}

std::vector<c10::IValue> objects_in(const std::vector<std::string>& messages, const ProcessGroup& group,
                                    const char* call) {
  std::vector<c10::IValue> objects;
  for (size_t rank = 0; rank < messages.size(); ++rank)
    objects.push_back(object_in(messages[rank], static_cast<int>(rank), group, call));
  return objects;
}

void check_rank(const ProcessGroup& group, int rank, const char* call, const char* role) {
  if (rank < 0 || rank >= group.size())
    throw UsageError(group.rank(),
                     text(call, ": ", role, " is rank ", rank, "; this group has ranks 0 to ", group.size() - 1));
}

}  // namespace

c10::IValue ProcessGroup::broadcast_object(const c10::IValue& object, int src, const CallOptions& options) const {
  member();
  check_rank(*this, src, "broadcast_object", "src");
  const auto message = broadcast_string(*this, rank() == src ? object_message(object) : "", src, options);
  return object_in(message, src, *this, "broadcast_object");
}

std::vector<c10::IValue> ProcessGroup::all_gather_object(const c10::IValue& object, const CallOptions& options) const {
  member();
  return objects_in(all_gather_strings(*this, object_message(object), options), *this, "all_gather_object");
}

std::vector<c10::IValue> ProcessGroup::gather_object(const c10::IValue& object, int dst,
                                                     const CallOptions& options) const {
  member();
  check_rank(*this, dst, "gather_object", "dst");
  const auto own_message = object_message(object);
  const auto messages = gather_strings(*this, own_message, dst, options);
  if (own_message.starts_with(kReason)) object_in(own_message, rank(), *this, "gather_object");  // throws
  return objects_in(messages, *this, "gather_object");
}

c10::IValue ProcessGroup::scatter_object(const std::vector<c10::IValue>& objects, int src,
                                         const CallOptions& options) const {
  member();
  check_rank(*this, src, "scatter_object", "src");
  std::vector<std::string> messages;
  if (rank() == src) {
    if (static_cast<int>(objects.size()) != size())
      throw UsageError(
          rank(), text("scatter_object: got ", objects.size(), " objects; expected ", size(), ", one for each rank"));
    for (const auto& object : objects) messages.push_back(object_message(object));
  }
  return object_in(scatter_strings(*this, messages, src, options), src, *this, "scatter_object");
}

void ProcessGroup::send_object(const c10::IValue& object, int dst, uint32_t tag, const CallOptions& options) const {
  member();
  const auto message = object_message(object);
  send_string(*this, message, dst, tag, options);
  if (message.starts_with(kReason)) object_in(message, rank(), *this, "send_object");  // throws
}

std::pair<int, c10::IValue> ProcessGroup::recv_any_object(uint32_t tag, const CallOptions& options) const {
  const auto [src, rest] = member().for_control().await_sender(tag, options);
  return {src, recv_object(src, tag, rest)};
}

c10::IValue ProcessGroup::recv_object(int src, uint32_t tag, const CallOptions& options) const {
  member();
  return object_in(recv_string(*this, src, tag, options), src, *this, "recv_object");
}

}  // namespace lockstep
