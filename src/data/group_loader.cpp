#include <lockstep/group_loader.h>

#include <exception>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

using Kind = BatchMessage::Kind;

std::optional<ProcessGroup> if_member(const std::optional<ProcessGroup>& group) {
  return group && group->contains_me() ? group : std::nullopt;
}

// A message's kind and sizes.
struct Header {
  enum { kKind, kSamples, kBytes, kCount };
  at::Tensor numbers = at::empty({kCount}, at::kLong);

  int64_t& operator[](int which) const { return numbers.data_ptr<int64_t>()[which]; }
};

Header header_of(const BatchMessage& message) {
  const Header header;
  header[Header::kKind] = static_cast<int64_t>(message.kind);
  header[Header::kSamples] = message.samples;
  header[Header::kBytes] = static_cast<int64_t>(message.bytes.size());
  return header;
}

// Returns a tensor that shares the memory of `bytes`.
at::Tensor bytes_as_tensor(std::string& bytes) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte);
}

// Allocates a message for the payload that the header announces.
BatchMessage with_room(const Header& header) {
  return {static_cast<Kind>(header[Header::kKind]), header[Header::kSamples],
          std::string(static_cast<size_t>(header[Header::kBytes]), '\0')};
}

BatchMessage scatter(const ProcessGroup& group, std::vector<BatchMessage> messages) {
  std::vector<at::Tensor> headers, bodies;
  for (auto& message : messages) {
    headers.push_back(header_of(message).numbers);
    bodies.push_back(bytes_as_tensor(message.bytes));
  }
  const Header header;
  group.scatter(header.numbers, headers, 0);
  auto mine = with_room(header);
  group.scatter(bytes_as_tensor(mine.bytes), bodies, 0);
  return mine;
}

BatchMessage broadcast(const ProcessGroup& group, BatchMessage message) {
  const auto header = header_of(message);
  group.broadcast(header.numbers, 0);
  if (group.rank() != 0) message = with_room(header);
  group.broadcast(bytes_as_tensor(message.bytes), 0);
  return message;
}

std::string describe_loading(const DistributedSampler& sampler, const DataLoaderOptions& options) {
  return text("samples ", sampler.dataset_size(), ", order ",
              sampler.order() ? sampler.order()->name() : "of the sampler", ", replicas ", sampler.num_replicas(),
              ", shuffle ", sampler.options().shuffle, ", seed ", sampler.options().seed, ", tail ",
              static_cast<int>(sampler.options().tail), ", batch_size ", options.batch_size, ", drop_last ",
              options.drop_last);
}

// Describes how the first differing rank differs from rank 0; empty if none does. Collective; returns the same on every
// rank.
std::string difference(const ProcessGroup& group, const std::string& mine, const char* what) {
  const auto all = group.all_gather_object(c10::IValue(mine));
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank].toStringRef() != all[0].toStringRef())
      return text("GroupLoader: the ", what, " differ: rank 0 has ", all[0].toStringRef(), "; rank ", rank, " has ",
                  all[rank].toStringRef(), "; use the same on all ranks");
  return "";
}

// Returns the first non-empty string of all ranks of the group. Collective.
std::string first_of_all(const ProcessGroup& group, const std::string& mine) {
  for (const auto& each : group.all_gather_object(c10::IValue(mine)))
    if (!each.toStringRef().empty()) return each.toStringRef();
  return "";
}

// Sets the sampler to the epoch and position of `leader`.
void follow(DistributedSampler& sampler, const DistributedSampler& leader) {
  sampler.set_epoch(leader.epoch());
  std::stringstream bytes;
  torch::serialize::OutputArchive saved;
  leader.save(saved);
  saved.save_to(bytes);
  torch::serialize::InputArchive loaded;
  loaded.load_from(bytes);
  sampler.load(loaded);
}

// Describes the first difference in the number of batches; empty if there is none. All ranks must have the same number:
// otherwise a rank would wait for messages that never arrive.
std::string unequal_batches(const DistributedSampler& mine, const std::vector<int>& ranks,
                            const DataLoaderOptions& options) {
  if (mine.options().tail != Tail::kExact) return "";  // all ranks have the same number of samples
  const auto batches_of = [&](int rank) { return batches_in(mine.for_rank(rank).size(), options); };
  for (int rank : ranks)
    if (options.batch_size > 0 && batches_of(rank) != batches_of(ranks[0]))
      return text("GroupLoader: rank ", ranks[0], " has ", batches_of(ranks[0]), " batches per epoch, but rank ", rank,
                  " has ", batches_of(rank), "; use Tail::kPad or Tail::kDrop");
  return "";
}

}  // namespace

struct GroupReading::State {
  // Throws an error that all ranks of the groups throw, after all of them have received it: a rank that left earlier
  // would abort the collective in which the others receive it.
  template <class Kind>
  [[noreturn]] void throw_together(const std::string& error) const {
    for (const auto& group : {groups.broadcast, groups.scatter}) {
      try {
        if (group) group->barrier();
      } catch (const Error&) {
        // Ignored: `error` is the root cause.
      }
    }
    throw Kind(error);
  }

  ReadingGroups groups;
  DistributedSampler sampler;
  DataLoaderOptions options;
  bool reads = true;
  std::vector<int> ranks{};  // sampler ranks of the ranks for which this rank reads
  uint64_t loop = 0;
};

GroupReading::GroupReading(ReadingGroups groups, DistributedSampler sampler, const DataLoaderOptions& options)
    : state_(std::make_unique<State>(
          State{{if_member(groups.scatter), if_member(groups.broadcast)}, std::move(sampler), options})) {
  State& state = *state_;
  const auto& [scattering, broadcasting] = state.groups;
  const int rank = state.sampler.rank();
  state.reads = scattering ? scattering->rank() == 0 : !broadcasting || broadcasting->rank() == 0;
  state.ranks = {rank};

  // An error on one rank must reach all ranks that are connected to it: first inside the broadcasting groups, then
  // inside the scattering group, then inside the broadcasting groups again.
  const std::string mine = describe_loading(state.sampler, options);
  std::string error;
  if (scattering && broadcasting && broadcasting->rank() != 0)
    error =
        text("GroupLoader: rank ", broadcasting->rank(),
             " of the group that broadcasts is also in the group that scatters; the group that scatters may contain "
             "only rank 0 of each group that broadcasts");
  if (broadcasting) {
    const auto unequal =
        difference(*broadcasting, text(mine, ", rank ", rank), "options of the ranks of the group that broadcasts");
    error = first_of_all(*broadcasting, error.empty() ? unequal : error);
  }
  if (scattering) {
    const auto unequal = difference(*scattering, mine, "options of the ranks of the group that scatters");
    error = first_of_all(*scattering, error.empty() ? unequal : error);
    state.ranks.clear();
    for (const auto& each : scattering->all_gather_object(c10::IValue(int64_t{rank})))
      state.ranks.push_back(static_cast<int>(each.toInt()));
    if (error.empty()) error = unequal_batches(state.sampler, state.ranks, options);
  }
  if (broadcasting) error = first_of_all(*broadcasting, error);
  if (!error.empty()) state.throw_together<MismatchError>(error);
}

GroupReading::~GroupReading() = default;

bool GroupReading::reads() const {
  return state_->reads;
}

std::vector<DistributedSampler> GroupReading::samplers() const {
  std::vector<DistributedSampler> samplers;
  const auto& mine = state_->sampler;
  if (state_->reads)
    for (int rank : state_->ranks) samplers.push_back(mine.for_rank(rank));
  return samplers;
}

void GroupReading::agree(const std::string& error) const {
  const auto& [scattering, broadcasting] = state_->groups;
  std::string said = error;
  if (scattering) said = scattering->broadcast_object(c10::IValue(said), 0).toStringRef();
  if (broadcasting) said = broadcasting->broadcast_object(c10::IValue(said), 0).toStringRef();
  if (!said.empty()) state_->throw_together<Error>(text("GroupLoader: on the reading rank: ", said));
}

// The reading rank reads at its own position, so all ranks must be there.
uint64_t GroupReading::begin() {
  State& state = *state_;
  state.sampler.reset();
  const auto where = text("epoch ", state.sampler.epoch(), ", position ", state.sampler.position());
  const auto& [scattering, broadcasting] = state.groups;
  std::string error;
  if (broadcasting) error = difference(*broadcasting, where, "samplers of the ranks of the group that broadcasts");
  if (scattering) {
    const auto unequal = difference(*scattering, where, "samplers of the ranks of the group that scatters");
    error = first_of_all(*scattering, error.empty() ? unequal : error);
  }
  if (broadcasting) error = first_of_all(*broadcasting, error);
  if (!error.empty()) state.throw_together<MismatchError>(error);
  return ++state.loop;
}

void GroupReading::place(std::vector<DistributedSampler>& samplers) const {
  for (auto& sampler : samplers) follow(sampler, state_->sampler);
}

void GroupReading::require_current(uint64_t loop) const {
  if (loop != state_->loop)
    throw UsageError("GroupLoader: another loop over this loader has started; use one loader for each loop");
}

BatchMessage GroupReading::distribute(std::vector<BatchMessage> messages) {
  State& state = *state_;
  const auto& [scattering, broadcasting] = state.groups;
  BatchMessage mine;
  if (scattering)
    mine = scatter(*scattering, std::move(messages));
  else if (state.reads)
    mine = std::move(messages.front());
  if (broadcasting) mine = broadcast(*broadcasting, std::move(mine));

  if (mine.kind == Kind::kError) state.throw_together<Error>(text("GroupLoader: on the reading rank: ", mine.bytes));
  if (mine.kind == Kind::kBatch)
    state.sampler.next(static_cast<size_t>(mine.samples));
  else if (state.sampler.position() < state.sampler.size())
    state.sampler.next(state.options.batch_size);  // skips the samples that drop_last drops: the epoch is over
  return mine;
}

std::string message_of_current() {
  const auto said = message_of(std::current_exception());
  return said.empty() ? "an exception without a message" : said;
}

size_t GroupReading::size() const {
  return batches_in(state_->sampler.size(), state_->options);
}

DistributedSampler GroupReading::sampler() const {
  return state_->sampler;
}

}  // namespace lockstep::detail
