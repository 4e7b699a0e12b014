#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/text.h"
#include "comm/strings.h"

namespace lockstep {
namespace {

// TorchScript's pickle format: supports every serializable IValue, and loading it runs no code.
std::string to_bytes(const ProcessGroup& group, const c10::IValue& object, const char* call) {
  try {
    auto bytes = torch::jit::pickle_save(object);
    return {bytes.begin(), bytes.end()};
  } catch (const std::exception& error) {
    throw UsageError(group.rank(),
                     text(call, ": a ", object.tagKind(),
                          " cannot be sent; use strings, numbers, tensors, or lists, tuples and dictionaries of them (",
                          error.what(), ")"));
  }
}

c10::IValue from_bytes(const std::string& bytes) {
  return torch::jit::pickle_load({bytes.begin(), bytes.end()});
}

std::vector<c10::IValue> read_all(const std::vector<std::string>& all) {
  std::vector<c10::IValue> objects;
  for (const auto& bytes : all) objects.push_back(from_bytes(bytes));
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
  return from_bytes(
      broadcast_string(*this, rank() == src ? to_bytes(*this, object, "broadcast_object") : "", src, options));
}

std::vector<c10::IValue> ProcessGroup::all_gather_object(const c10::IValue& object, const CallOptions& options) const {
  member();
  return read_all(all_gather_strings(*this, to_bytes(*this, object, "all_gather_object"), options));
}

std::vector<c10::IValue> ProcessGroup::gather_object(const c10::IValue& object, int dst,
                                                     const CallOptions& options) const {
  member();
  check_rank(*this, dst, "gather_object", "dst");
  return read_all(gather_strings(*this, to_bytes(*this, object, "gather_object"), dst, options));
}

c10::IValue ProcessGroup::scatter_object(const std::vector<c10::IValue>& objects, int src,
                                         const CallOptions& options) const {
  member();
  check_rank(*this, src, "scatter_object", "src");
  std::vector<std::string> all;
  if (rank() == src) {
    if (static_cast<int>(objects.size()) != size())
      throw UsageError(
          rank(), text("scatter_object: got ", objects.size(), " objects; expected ", size(), ", one for each rank"));
    for (const auto& object : objects) all.push_back(to_bytes(*this, object, "scatter_object"));
  }
  return from_bytes(scatter_strings(*this, all, src, options));
}

}  // namespace lockstep
