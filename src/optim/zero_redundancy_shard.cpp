#include "optim/zero_redundancy_shard.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/capture.h"
#include "optim/layout.h"

namespace lockstep {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

// Of the norm or the sum. Rounding makes averages and clipped gradients of different processors differ by less: a
// bfloat16 by at most 0.8 %. Gradients of different batches differ by far more.
constexpr double kTolerance = 1e-3, kToleranceOfHalf = 2e-2;

// Elements that are converted to float64 at once: a copy of a whole parameter might not fit into memory.
constexpr int64_t kSummaryPiece = 1 << 20;

/// What ranks compare of a tensor. The sum depends on the signs of the elements, the norm does not.
struct Summary {
  double sum, norm;
  bool is_finite() const { return std::isfinite(sum) && std::isfinite(norm); }
};
constexpr int64_t kSummarySize = sizeof(Summary) / sizeof(double);

/// Adds the numbers of a Summary, which stay on the tensor's device; zeros if there are no elements to compare.
void add_summary(const at::Tensor& tensor, const c10::Device& device, std::vector<at::Tensor>& numbers) {
  if (!tensor.defined() || tensor.layout() != c10::kStrided) {
    numbers.push_back(at::zeros({kSummarySize}, at::TensorOptions(at::kDouble).device(device)));
    return;
  }
  const auto real = (tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor).detach();
  const auto row = real.is_non_overlapping_and_dense() ? detail::as_row(real) : real.reshape({-1});
  auto sum = at::zeros({}, row.options().dtype(at::kDouble)), squares = at::zeros_like(sum);
  for (int64_t begin = 0; begin < row.numel(); begin += kSummaryPiece) {
    const auto piece = row.narrow(0, begin, std::min(kSummaryPiece, row.numel() - begin)).to(at::kDouble);
    sum += piece.sum();
    squares += piece.dot(piece);
  }
  numbers.push_back(at::stack({sum, squares.sqrt()}));
}

bool differ(const Summary& a, const Summary& b, double tolerance) {
  if (!a.is_finite() || !b.is_finite()) return a.is_finite() != b.is_finite();
  const double norm = std::max(a.norm, b.norm), sum = std::max(std::abs(a.sum), std::abs(b.sum));
  return std::abs(a.norm - b.norm) > tolerance * norm || std::abs(a.sum - b.sum) > tolerance * std::max(norm, sum);
}

}  // namespace

ZeroRedundancyOptimizerBase::Shard::Shard(Optimizer& outer, std::vector<std::string> names, ProcessGroup group,
                                          ShardBy by, const ZeroRedundancyOptions& options, const Make& make,
                                          void (*before_replay)(Optimizer&))
    : outer_(&outer),
      names_(std::move(names)),
      group_(std::move(group)),
      buffer_(options.share_parameters ? Buffer::kShared : Buffer::kOwn),
      keeps_undo_(options.undo),
      holds_updates_(options.hold_updates),
      make_(make),
      by_(by),
      before_replay_(before_replay) {
  for (size_t g = 0; g < outer.param_groups().size(); ++g)
    for (const auto& parameter : outer.param_groups()[g].params()) {
      parameters_.push_back(parameter);
      group_of_.push_back(g);
    }
  check_parameters();
  if (buffer_ == Buffer::kShared) check_can_share();
  move_parameters();
  make_inner();
}

/// Makes the inner optimizer, with this rank's pieces of the parameters.
void ZeroRedundancyOptimizerBase::Shard::make_inner() {
  std::vector<OptimizerParamGroup> groups;
  for (size_t g = 0; g < outer_->param_groups().size(); ++g) {
    std::vector<at::Tensor> values;
    for (const auto& share : shares_)
      if (share.group == g) values.push_back(memories_[share.memory].memory.values(share.here));
    groups.emplace_back(std::move(values), outer_->param_groups()[g].options().clone());
  }
  inner_ = make_(std::move(groups));
  written_ = versions();
}

std::string ZeroRedundancyOptimizerBase::Shard::name_of(size_t parameter) const {
  if (parameter < names_.size()) return text("parameter '", names_[parameter], "'");
  return text("parameter ", parameter);
}

/// Describes what is wrong with this rank's parameters, for an error message; empty if nothing is.
std::string ZeroRedundancyOptimizerBase::Shard::what_is_wrong() const {
  if (parameters_.empty()) return "there are no parameters";
  std::set<const c10::TensorImpl*> seen;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const auto about = text(name_of(i), ", of sizes ", parameter.sizes(), ", ");
    if (parameter.layout() != c10::kStrided)
      return text(about, "has layout ", parameter.layout(), "; only dense parameters can be divided");
    if (parameter.device() != group_.device())
      return text(about, "is on ", parameter.device(), ", but the group's device is ", group_.device(),
                  "; move the model there first");
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second)
      return text(about, "is listed twice; ddp.parameters() lists each once");
  }
  return {};
}

// Compares the parameters of all ranks: ranks that disagree would assign shares to the wrong parameters. Collective;
// throws on all ranks or on none.
void ZeroRedundancyOptimizerBase::Shard::check_parameters() const {
  if (!group_.contains_me())
    throw UsageError(text("ZeroRedundancyOptimizer: this process is not in group ", group_.name(),
                          "; pass a group that contains it"));
  const auto wrong = what_is_wrong();
  std::vector<c10::IValue> facts{wrong};
  if (wrong.empty())
    for (size_t i = 0; i < parameters_.size(); ++i)
      facts.emplace_back(text(name_of(i), " of group ", group_of_[i], " is ", parameters_[i].sizes(), " with strides ",
                              parameters_[i].strides(), ", ", parameters_[i].scalar_type()));
  const auto all = group_.all_gather_object(c10::ivalue::Tuple::create(std::move(facts)));
  for (int rank = 0; rank < group_.size(); ++rank)
    if (const auto& theirs = all[rank].toTupleRef().elements()[0].toStringRef(); !theirs.empty())
      throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer: on rank ", rank, ", ", theirs));
  const auto& first = all[0].toTupleRef().elements();
  for (int rank = 1; rank < group_.size(); ++rank) {
    const auto& theirs = all[rank].toTupleRef().elements();
    for (size_t i = 0; i < std::max(first.size(), theirs.size()); ++i) {
      auto fact = [&](const auto& list) {
        return i < list.size() ? list[i].toStringRef() : text("there are ", list.size() - 1, " parameters");
      };
      if (fact(first) != fact(theirs))
        throw MismatchError(group_.rank(), text("ZeroRedundancyOptimizer: on rank 0 ", fact(first), ", on rank ", rank,
                                                " ", fact(theirs), "; build the same model on every rank"));
    }
  }
}

void ZeroRedundancyOptimizerBase::Shard::move_parameters() {
  std::map<at::ScalarType, std::vector<size_t>> by_dtype;
  for (size_t i = 0; i < parameters_.size(); ++i) by_dtype[parameters_[i].scalar_type()].push_back(i);
  for (const auto& [dtype, alike] : by_dtype)
    for (const auto& members : segments(alike)) add_memory(members);
  if (buffer_ == Buffer::kShared) check_equal_values();
  use_memories();
}

void ZeroRedundancyOptimizerBase::Shard::add_memory(const std::vector<size_t>& members) {
  std::vector<at::Tensor> tensors;
  for (size_t i : members) tensors.push_back(parameters_[i]);
  memories_.push_back({members, detail::ShardedMemory(group_, std::move(tensors), by_, buffer_)});
  for (const auto& piece : memories_.back().memory.pieces()) {
    const size_t parameter = members[piece.parameter];
    shares_.push_back({memories_.size() - 1, piece, {parameter, piece.begin, piece.size}, group_of_[parameter]});
  }
}

/// Lets the parameters use the memories that were added.
void ZeroRedundancyOptimizerBase::Shard::use_memories() {
  for (const auto& memory : memories_) memory.memory.move_parameters();
  std::sort(shares_.begin(), shares_.end(),
            [](const Share& a, const Share& b) { return a.overall.parameter < b.overall.parameter; });
}

ZeroRedundancyOptimizerBase::Shard::Versions ZeroRedundancyOptimizerBase::Shard::versions() const {
  Versions result;
  for (size_t i = 0; i < parameters_.size(); ++i) result.push_back(version_of(i));
  return result;
}

ZeroRedundancyOptimizerBase::Shard::Version ZeroRedundancyOptimizerBase::Shard::version_of(size_t parameter) const {
  return {static_cast<uint64_t>(parameters_[parameter]._version()), parameters_[parameter].data_ptr()};
}

/// The parameters that were written to, or got other memory, since the last step.
std::vector<size_t> ZeroRedundancyOptimizerBase::Shard::written_parameters() const {
  const auto now = versions();
  std::vector<size_t> written;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (now[i] != written_[i]) written.push_back(i);
  return written;
}

void ZeroRedundancyOptimizerBase::Shard::take_writes() {
  const auto written = written_parameters();
  if (buffer_ == Buffer::kShared) agree_on_writes(written);
  note_writes();
  check_unchanged();
  // A rank that copies values into the shared memory late would overwrite updates of the other ranks. In most steps
  // nothing was written: all ranks know that, because their lists are equal, and do not wait.
  if (buffer_ == Buffer::kShared && !written.empty()) group_.barrier(detail::kInStep);
}

/// Tells the inner optimizer, whose parameters are views, that the parameters were written to since the last step.
void ZeroRedundancyOptimizerBase::Shard::note_writes() {
  if (written_parameters().empty()) return;
  for (const auto& group : inner_->param_groups())
    for (const auto& values : group.params()) values.unsafeGetTensorImpl()->bump_version();
}

// Moves replaced memory back. Not collective. Throws on all ranks or on none if all ranks run the same program.
void ZeroRedundancyOptimizerBase::Shard::check_unchanged() const {
  size_t count = 0;
  for (const auto& group : outer_->param_groups()) count += group.params().size();
  if (count != parameters_.size())
    throw UsageError(group_.rank(), text("ZeroRedundancyOptimizer was constructed with ", parameters_.size(),
                                         " parameters and has ", count, " now; pass all groups to its constructor"));
  for (const auto& [members, memory] : memories_)
    for (size_t i = 0; i < members.size(); ++i)
      if (!memory.restore_storage(i))
        throw UsageError(
            group_.rank(),
            text(name_of(members[i]), " has become ", parameters_[members[i]].sizes(), ' ',
                 parameters_[members[i]].scalar_type(), " on ", parameters_[members[i]].device(),
                 " after ZeroRedundancyOptimizer was constructed; construct the optimizer after the model ",
                 "is final"));
}

// Takes the learning rates of `rank`, which still has inputs in a join, and adds gradients of zero for parameters that
// have a gradient there but not here. A rank without inputs does not run the loop that sets them. Collective.
void ZeroRedundancyOptimizerBase::Shard::do_as(int rank) const {
  auto& groups = outer_->param_groups();
  std::vector<double> here;
  for (const auto& group : groups) here.push_back(group.options().get_lr());
  for (const auto& parameter : parameters_) here.push_back(parameter.grad().defined());
  auto there = at::tensor(here, at::kDouble).to(group_.device());
  group_.broadcast(there, rank);
  if (group_.rank() == rank) return;
  there = there.cpu();
  const double* value = there.data_ptr<double>();
  for (auto& group : groups) group.options().set_lr(*value++);
  for (const auto& parameter : parameters_) {
    auto& gradient = parameter.mutable_grad();
    if (*value++ != 0 && !gradient.defined()) gradient = at::zeros_like(parameter);
  }
}

void ZeroRedundancyOptimizerBase::Shard::take_options() const {
  if (!outer_)
    throw UsageError(
        "the captured step cannot be replayed: its ZeroRedundancyOptimizer was destroyed; create a new CapturedStep");
  for (size_t g = 0; g < inner_->param_groups().size(); ++g)
    inner_->param_groups()[g].set_options(outer_->param_groups()[g].options().clone());
}

/// Throws MismatchError on all ranks if parameters, or their gradients, differ between the ranks by more than rounding.
/// Each rank updates a part of a parameter, so the all-gather would mix the ranks' values. In the first step, and
/// further ones until no gradient overflows. Collective.
void ZeroRedundancyOptimizerBase::Shard::check_first_step() {
  if (is_checked_ || updates_in_backward() || group_.size() == 1 || detail::is_capturing(group_.device())) return;
  std::vector<at::Tensor> numbers;
  for (const auto& parameter : parameters_) {
    add_summary(parameter, group_.device(), numbers);
    add_summary(parameter.grad(), group_.device(), numbers);
  }
  const auto mine = at::cat(numbers);
  auto all = at::empty({group_.size() * mine.numel()}, mine.options());
  group_.all_gather(all, mine, detail::kInStep);
  all = all.cpu();
  const auto count = static_cast<int64_t>(numbers.size());
  const auto summary = [&](int rank, int64_t i) {
    Summary result{};
    std::memcpy(&result, all.data_ptr<double>() + (rank * count + i) * kSummarySize, sizeof result);
    return result;
  };
  bool is_finite = true;
  for (int64_t i = 0; i < count; ++i)
    for (int rank = 0; rank < group_.size(); ++rank) {
      const auto first = summary(0, i), theirs = summary(rank, i);
      const bool is_gradient = i % 2 != 0;
      is_finite = is_finite && (!is_gradient || theirs.is_finite());
      const bool is_half = parameters_[static_cast<size_t>(i / 2)].element_size() == 2;
      if (!differ(first, theirs, is_half ? kToleranceOfHalf : kTolerance)) continue;
      throw MismatchError(
          group_.rank(),
          text("step of ZeroRedundancyOptimizer: ", is_gradient ? "the gradient of " : "",
               name_of(static_cast<size_t>(i / 2)), " has norm ", first.norm, " and sum ", first.sum,
               " on rank 0, norm ", theirs.norm, " and sum ", theirs.sum, " on rank ", rank,
               ", but each rank updates a part of it for all ranks; wrap the model in DistributedDataParallel, ",
               is_gradient ? "which averages gradients" : "which copies rank 0's parameters",
               ", and give parameters of its option ignore an optimizer of their own"));
    }
  is_checked_ = is_finite;
}

void ZeroRedundancyOptimizerBase::Shard::step(const at::Tensor& skip) {
  check_first_step();
  take_options();
  set_gradients();
  step_incomplete_ = !detail::is_capturing(group_.device());
  if (!skip.defined())
    inner_->step();
  else if (auto* skippable = dynamic_cast<SkippableStep*>(inner_.get()))
    skippable->step_unless(skip);
  else if (skip.item<float>() == 0)
    inner_->step();
  for (auto& group : inner_->param_groups())
    for (auto& values : group.params()) values.mutable_grad().reset();  // zero_grad() can then free the gradients
  if (buffer_ == Buffer::kOwn)
    gather();
  else
    group_.barrier(detail::kInStep);
  for (const auto& parameter : parameters_) parameter.unsafeGetTensorImpl()->bump_version();
  written_ = versions();
  std::fill(updated_.begin(), updated_.end(), 0);
  step_incomplete_ = false;
}

/// Gives the pieces of the inner optimizer their gradients.
void ZeroRedundancyOptimizerBase::Shard::set_gradients() const {
  if (bucket_updates_) {
    for (const auto& bucket : bucket_updates_->buckets) set_gradients(bucket.pieces);
    return;
  }
  size_t next = 0;
  for (auto& group : inner_->param_groups())
    for (auto& values : group.params()) {
      const auto& share = shares_[next++];
      values.mutable_grad() = memories_[share.memory].memory.gradient(share.here);
    }
}

/// Sends the updated pieces to all ranks. Memories behind those of buckets have parameters that are not updated.
void ZeroRedundancyOptimizerBase::Shard::gather() const {
  const size_t updated = bucket_updates_ ? bucket_updates_->buckets.size() : memories_.size();
  if (updated == 1) return memories_.front().memory.gather(detail::kInStep);
  std::vector<Work> gathers;
  for (size_t i = 0; i < updated; ++i) gathers.push_back(memories_[i].memory.gather_async(detail::kInStep));
  for (const auto& work : gathers) work.wait();
}

}  // namespace lockstep
