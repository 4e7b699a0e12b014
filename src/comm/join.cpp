#include "comm/join.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "base/text.h"

namespace lockstep {

InputsExhausted::~InputsExhausted() = default;
Joinable::~Joinable() = default;

namespace detail {
namespace {

thread_local std::vector<const JoinContext*>
    joins_of_thread;  // the joins that this thread is in; the innermost is the last

bool has_all_ranks_of(const ProcessGroup& group, const ProcessGroup& other) {
  const auto ranks = group.global_ranks();
  const auto others = other.global_ranks();
  return std::all_of(others.begin(), others.end(),
                     [&](int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); });
}

}  // namespace

int JoinRound::trains() const {
  return static_cast<int>(std::count(has_inputs.begin(), has_inputs.end(), true));
}

int JoinRound::last_rank() const {
  for (int rank = static_cast<int>(has_inputs.size()) - 1; rank >= 0; --rank)
    if (has_inputs[rank]) return rank;
  return -1;
}

JoinContext::JoinContext(ProcessGroup group, JoinOptions options) : group_(std::move(group)), options_(options) {}

const JoinRound& JoinContext::next_round(const Turn& turn) {
  // Layout: the weight of each rank, whether each rank has inputs, then the number of ranks for each of three flags.
  const int ranks = group_.size();
  auto sum = at::zeros({2 * ranks + 3}, at::kDouble);
  double* value = sum.data_ptr<double>();
  double* flags = value + 2 * ranks;
  value[group_.rank()] = turn.weight.value_or(0);
  value[ranks + group_.rank()] = turn.weight.has_value();
  flags[0] = turn.is_weighted;
  flags[1] = turn.is_synchronized;
  flags[2] = turn.is_training;
  sum = sum.to(group_.device());
  group_.all_reduce(sum, ReduceOp::kSum, {.site = {"the beginning of an iteration in lockstep::join", 0}});
  sum = sum.cpu();
  value = sum.data_ptr<double>();
  flags = value + 2 * ranks;
  round_ = {{value, value + ranks}, {}, flags[0] > 0, flags[1] > 0, flags[2] > 0};
  for (int rank = 0; rank < ranks; ++rank) round_.has_inputs.push_back(value[ranks + rank] > 0);

  const int trains = round_.trains();
  if (options_.throw_on_early_termination && trains > 0 && trains < group_.size()) {
    std::vector<int> out;
    for (int rank = 0; rank < group_.size(); ++rank)
      if (!round_.has_inputs[rank]) out.push_back(rank);
    throw InputsExhausted(group_.rank(),
                          text(out.size() == 1 ? "rank " : "ranks ", enumerate(out), out.size() == 1 ? " has" : " have",
                               " no inputs left; all ranks stop here"));
  }
  auto check_agreed = [&](double count, const char* what, const char* remedy) {
    if (count != 0 && count != trains)
      throw MismatchError(group_.rank(), text(count, " of the ", trains, " ranks that train ", what,
                                              " in this iteration, the others do not; ", remedy));
  };
  check_agreed(flags[1], "average their gradients", "use no_sync in the same iterations on every rank");
  check_agreed(flags[2], "have their model in training mode",
               "call train() and eval() in the same iterations on every rank");
  return round_;
}

JoinMembers::JoinMembers(const std::vector<Joinable*>& members, const JoinOptions& options) : members_(members) {
  if (members.empty() || std::find(members.begin(), members.end(), nullptr) != members.end())
    throw UsageError("join: the list of members is empty or contains a null pointer; pass the wrapper, as in {&ddp}");
  const auto group = members.front()->join_group();
  for (size_t i = 0; i < members.size(); ++i)
    if (const auto ranks = members[i]->join_group().global_ranks(); ranks != group.global_ranks())
      throw UsageError(group.rank(),
                       text("join: member ", i, " has ranks ", enumerate(ranks), ", but member 0 has ranks ",
                            enumerate(group.global_ranks()), "; run one join for each group"));
  context_ = std::make_shared<JoinContext>(group, options);
  try {
    for (auto* member : members) {
      member->enter_join(context_, /*is_first=*/entered_ == 0);
      ++entered_;
    }
    joins_of_thread.push_back(context_.get());
  } catch (...) {
    leave();
    throw;
  }
}

JoinMembers::~JoinMembers() {
  joins_of_thread.pop_back();
  leave();
}

void JoinMembers::leave() noexcept {
  for (size_t i = 0; i < entered_; ++i) members_[i]->leave_join();
}

void JoinMembers::follow_others() {
  int source = context_->group().size() - 1;
  if (context_->round().trains() > 0) source = context_->round().last_rank();
  while (context_->next_round({}).trains() > 0) {
    source = context_->round().last_rank();
    for (auto* member : members_) member->shadow(context_->round());
  }
  for (auto* member : members_) member->copy_state_from(source);
}

bool is_in_join() {
  return !joins_of_thread.empty();
}

void refuse_in_join(const ProcessGroup& group, const char* call, const char* remedy) {
  for (const auto* join : joins_of_thread) {
    if (group.size() == 1 && join->group().size() > 1) continue;  // no other rank takes part in the call
    if (!join->options().throw_on_early_termination || !has_all_ranks_of(join->group(), group))
      throw UsageError(group.rank(), text(call, " is called inside of join(), where ranks make different numbers of ",
                                          "calls, but all ranks must make this call equally often; ", remedy));
  }
}

}  // namespace detail

void join(const std::vector<Joinable*>& members, const JoinOptions& options, const std::function<void()>& loop) {
  detail::JoinMembers joined(members, options);
  loop();
  joined.follow_others();
}

void join(const std::vector<Joinable*>& members, const std::function<void()>& loop) {
  join(members, {}, loop);
}

}  // namespace lockstep
