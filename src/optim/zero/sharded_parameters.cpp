#include "optim/zero/sharded_parameters.h"

#include <algorithm>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/dense.h"
#include "comm/shared_memory_calls.h"

namespace lockstep::detail {
namespace {

// A bucket of gradients should contain parts of all ranks' shares, so that all ranks work on its update.
constexpr int64_t kSegmentBytes = 1 << 20;

}  // namespace

ShardedParameters::ShardedParameters(ProcessGroup group, std::vector<Parameter> parameters,
                                     std::vector<std::string> names, ShardBy by, Buffer buffer)
    : group_(std::move(group)), parameters_(std::move(parameters)), names_(std::move(names)), by_(by), buffer_(buffer) {
  for (size_t i = 0; i < size(); ++i) indices_.emplace(tensor(i).unsafeGetTensorImpl(), i);
  check_alike();
  if (are_shared()) check_can_share();
  divide({});
}

std::string ShardedParameters::name_of(size_t parameter) const {
  if (parameter < names_.size()) return text("parameter '", names_[parameter], "'");
  return text("parameter ", parameter);
}

std::optional<size_t> ShardedParameters::find(const at::Tensor& tensor) const {
  const auto found = indices_.find(tensor.unsafeGetTensorImpl());
  return found == indices_.end() ? std::nullopt : std::optional(found->second);
}

// --- checks

/// Describes a parameter of this rank that cannot be divided, for an error message; empty if there is none.
std::string ShardedParameters::why_not_divisible() const {
  if (parameters_.empty()) return "there are no parameters";
  for (size_t i = 0; i < size(); ++i) {
    const auto& parameter = tensor(i);
    const auto about = text(name_of(i), ", of sizes ", parameter.sizes(), ", ");
    if (parameter.layout() != c10::kStrided)
      return text(about, "has layout ", parameter.layout(), "; only dense parameters can be divided");
    if (parameter.device() != group_.device())
      return text(about, "is on ", parameter.device(), ", but the group's device is ", group_.device(),
                  "; move the model there first");
    if (const auto why = why_not_writable(parameter); !why.empty()) return text(about, why);
    if (indices_.at(parameter.unsafeGetTensorImpl()) != i)
      return text(about, "is listed twice; ddp.parameters() lists each once");
  }
  return {};
}

/// Compares the parameters of all ranks: ranks that disagree would assign shares to the wrong parameters. Collective.
void ShardedParameters::check_alike() const {
  const auto wrong = why_not_divisible();
  std::vector<c10::IValue> facts{wrong};
  if (wrong.empty())
    for (size_t i = 0; i < size(); ++i)
      facts.emplace_back(text(name_of(i), " of group ", group_of(i), " is ", tensor(i).sizes(), " with strides ",
                              tensor(i).strides(), ", ", tensor(i).scalar_type()));
  const auto all = group_.all_gather_object(c10::ivalue::Tuple::create(std::move(facts)));
  for (int rank = 0; rank < group_.size(); ++rank)
    if (const auto& error = all[rank].toTupleRef().elements()[0].toStringRef(); !error.empty())
      throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: on rank ", rank, ", ", error));
  const auto& first = all[0].toTupleRef().elements();
  for (int rank = 1; rank < group_.size(); ++rank) {
    const auto& other = all[rank].toTupleRef().elements();
    for (size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      auto fact = [&](const auto& list) {
        return i < list.size() ? list[i].toStringRef() : text("there are ", list.size() - 1, " parameters");
      };
      if (fact(first) != fact(other))
        throw MismatchError(group_.rank(), text("ZeroRedundancyOptimizer: on rank 0 ", fact(first), ", on rank ", rank,
                                                " ", fact(other), "; build the same model on every rank"));
    }
  }
}

void ShardedParameters::check_can_share() const {
  if (!group_.device().is_cpu())
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: share_parameters is for parameters on the CPU, but "
                                         "the group's device is ",
                                         group_.device(), "; leave share_parameters out"));
  if (!shares_memory(group_))
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: share_parameters needs ranks that share memory, but "
                                         "group ",
                                         group_.name(), " uses ", describe_backend(group_),
                                         "; pass a group of the ranks of one host with backend 'shm', as "
                                         "split_group() makes it"));
}

/// For shared parameters, before they use the memory, which has the values of rank 0. Collective.
void ShardedParameters::check_equal_values() const {
  group_.barrier(kInConstructor);  // rank 0 has written its values
  std::string differing;
  for (const auto& [members, memory] : memories_)
    if (const auto first = memory.first_difference(); first && differing.empty()) differing = name_of(members[*first]);
  const auto all = group_.all_gather_object(differing, kInConstructor);
  for (int rank = 0; rank < group_.size(); ++rank)
    if (const auto& parameter = all[rank].toStringRef(); !parameter.empty())
      throw MismatchError(group_.rank(), text("ZeroRedundancyOptimizer: share_parameters needs equal parameters on all "
                                              "ranks, but ",
                                              parameter, " of rank ", rank,
                                              " differs from rank 0's; wrap "
                                              "the model in DistributedDataParallel first, which copies rank 0's"));
}

// --- memory

void ShardedParameters::divide(const std::vector<std::vector<size_t>>& lists) {
  memories_.clear();
  pieces_.clear();
  std::vector<char> is_listed(size());
  for (const auto& members : lists) {
    add_memory(members);
    for (size_t i : members) is_listed[i] = 1;
  }
  std::map<at::ScalarType, std::vector<size_t>> others;
  for (size_t i = 0; i < size(); ++i)
    if (!is_listed[i]) others[tensor(i).scalar_type()].push_back(i);
  for (const auto& [dtype, alike] : others)
    for (const auto& members : segments(alike)) add_memory(members);
  if (are_shared()) check_equal_values();
  for (const auto& [members, memory] : memories_) memory.move_parameters();
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.overall.parameter < b.overall.parameter; });
  note_values();
}

void ShardedParameters::add_memory(const std::vector<size_t>& members) {
  std::vector<at::Tensor> tensors;
  for (size_t i : members) tensors.push_back(tensor(i));
  memories_.push_back({members, ShardedMemory(group_, std::move(tensors), by_, buffer_)});
  for (const auto& piece : memories_.back().memory.pieces())
    pieces_.push_back({memories_.size() - 1, piece, {members[piece.parameter], piece.begin, piece.size}});
}

/// Cuts parameters of one dtype into lists, each of which is divided between all ranks.
std::vector<std::vector<size_t>> ShardedParameters::segments(const std::vector<size_t>& members) const {
  if (!are_shared() || by_ == ShardBy::kParameters) return {members};
  std::vector<std::vector<size_t>> result;
  int64_t bytes = kSegmentBytes;
  for (size_t parameter : members) {
    if (bytes >= kSegmentBytes) {
      result.emplace_back();
      bytes = 0;
    }
    result.back().push_back(parameter);
    bytes += static_cast<int64_t>(tensor(parameter).nbytes());
  }
  return result;
}

void ShardedParameters::publish_updates(size_t memories) const {
  if (are_shared()) return group_.barrier(kInStep);
  if (memories == 1) return memories_.front().memory.gather(kInStep);
  std::vector<Work> gathers;
  for (size_t i = 0; i < memories; ++i) gathers.push_back(memories_[i].memory.gather_async(kInStep));
  for (const auto& work : gathers) work.wait();
}

// --- values that the program writes

ShardedParameters::Version ShardedParameters::version_of(size_t parameter) const {
  return {static_cast<uint64_t>(tensor(parameter)._version()), tensor(parameter).data_ptr()};
}

std::vector<size_t> ShardedParameters::written() const {
  std::vector<size_t> result;
  for (size_t i = 0; i < size(); ++i)
    if (version_of(i) != noted_[i]) result.push_back(i);
  return result;
}

void ShardedParameters::note_values() {
  noted_.resize(size());
  for (size_t i = 0; i < size(); ++i) note_values(i);
}

void ShardedParameters::note_values(size_t parameter) {
  noted_[parameter] = version_of(parameter);
}

// Throws on all ranks or on none if all ranks run the same program.
void ShardedParameters::restore_memory() const {
  for (const auto& [members, memory] : memories_)
    for (size_t i = 0; i < members.size(); ++i)
      if (!memory.restore_storage(i))
        throw UsageError(
            group_.rank(),
            text(name_of(members[i]), " has become ", tensor(members[i]).sizes(), ' ', tensor(members[i]).scalar_type(),
                 " on ", tensor(members[i]).device(),
                 " after ZeroRedundancyOptimizer was constructed; construct the optimizer after the model ",
                 "is final"));
}

void ShardedParameters::agree_on_writes(const std::vector<size_t>& written) const {
  auto max_written = at::full({1}, static_cast<int64_t>(written.size()), at::kLong);
  group_.all_reduce(max_written, ReduceOp::kMax, kInStep);
  if (max_written.item<int64_t>() == 0) return;
  std::vector<c10::IValue> own;
  for (size_t parameter : written) own.emplace_back(static_cast<int64_t>(parameter));
  const auto all = group_.all_gather_object(c10::ivalue::Tuple::create(std::move(own)), kInStep);
  std::vector<std::set<int64_t>> writes(all.size());
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& parameter : all[rank].toTupleRef().elements()) writes[rank].insert(parameter.toInt());
  for (size_t rank = 0; rank < writes.size(); ++rank)
    for (int64_t parameter : writes[rank])
      for (size_t other = 0; other < writes.size(); ++other)
        if (!writes[other].contains(parameter))
          throw MismatchError(
              group_.rank(),
              text("rank ", rank, " wrote to ", name_of(static_cast<size_t>(parameter)),
                   " since the last step, and rank ", other,
                   " did not, but all ranks share the parameters "
                   "(share_parameters); only step() may change them, except for loading the same values on every "
                   "rank"));
}

}  // namespace lockstep::detail
