#include <lockstep/group_loader.h>

#include <algorithm>
#include <array>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {
namespace {

using Kind = Parcel::Kind;

std::optional<ProcessGroup> if_member(const std::optional<ProcessGroup>& group) {
  return group && group->contains_me() ? group : std::nullopt;
}

at::Tensor header_of(const Parcel& parcel) {
  return at::tensor({static_cast<int64_t>(parcel.kind), parcel.samples, static_cast<int64_t>(parcel.bytes.size())},
                    at::kLong);
}

// The memory of the bytes themselves.
at::Tensor tensor_of(std::string& bytes) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte);
}

Parcel with_room(const at::Tensor& header) {
  const auto* numbers = header.data_ptr<int64_t>();
  return {static_cast<Kind>(numbers[0]), numbers[1], std::string(static_cast<size_t>(numbers[2]), '\0')};
}

Parcel scatter(const ProcessGroup& group, std::vector<Parcel> parcels) {
  std::vector<at::Tensor> headers, bodies;
  for (auto& parcel : parcels) {
    headers.push_back(header_of(parcel));
    bodies.push_back(tensor_of(parcel.bytes));
  }
  auto header = at::empty({3}, at::kLong);
  group.scatter(header, headers, 0);
  auto mine = with_room(header);
  group.scatter(tensor_of(mine.bytes), bodies, 0);
  return mine;
}

Parcel broadcast(const ProcessGroup& group, Parcel parcel) {
  auto header = header_of(parcel);
  group.broadcast(header, 0);
  if (group.rank() != 0) parcel = with_room(header);
  group.broadcast(tensor_of(parcel.bytes), 0);
  return parcel;
}

std::string describe(const DistributedSampler& sampler, const DataLoaderOptions& options) {
  return text("samples ", sampler.dataset_size(), ", replicas ", sampler.num_replicas(), ", shuffle ",
              sampler.options().shuffle, ", seed ", sampler.options().seed, ", tail ",
              static_cast<int>(sampler.options().tail), ", batch_size ", options.batch_size, ", drop_last ",
              options.drop_last);
}

void require_equal(const ProcessGroup& group, const std::string& mine, const char* what) {
  const auto all = group.all_gather_object(c10::IValue(mine));
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank].toStringRef() != all[0].toStringRef())
      throw MismatchError(text("GroupLoader: ranks of the group that ", what, " differ: rank 0 has ",
                               all[0].toStringRef(), "; rank ", rank, " has ", all[rank].toStringRef(),
                               "; give all of them the same"));
}

// Puts a sampler where another is: in the same epoch, at the same position.
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

// All end together, or one of them would wait for parcels that do not come.
void refuse_unequal_ends(std::vector<Parcel>& parcels) {
  const auto ended =
      std::count_if(parcels.begin(), parcels.end(), [](const Parcel& it) { return it.kind == Kind::kEnd; });
  if (ended == 0 || ended == static_cast<std::ptrdiff_t>(parcels.size())) return;
  const std::string why = text(ended, " of ", parcels.size(),
                               " ranks have no more batches and the others have; use Tail::kPad or Tail::kDrop");
  for (auto& parcel : parcels) parcel = {Kind::kError, 0, why};
}

}  // namespace

struct GroupReading::State {
  ReadingGroups groups;
  DistributedSampler sampler;
  DataLoaderOptions options;
  bool reads = true;
  std::vector<int> ranks{};  // the samplers' ranks of those for whom this rank reads
  uint64_t loop = 0;
};

GroupReading::GroupReading(ReadingGroups groups, DistributedSampler sampler, const DataLoaderOptions& options)
    : state_(std::make_unique<State>(
          State{{if_member(groups.scatter), if_member(groups.broadcast)}, std::move(sampler), options})) {
  State& state = *state_;
  const auto& [scattering, broadcasting] = state.groups;
  const int rank = state.sampler.rank();
  if (scattering && broadcasting && broadcasting->rank() != 0)
    throw UsageError(
        text("GroupLoader: rank ", broadcasting->rank(),
             " of the group that broadcasts is in the group that scatters, too; scatter over their ranks 0"));
  state.reads = scattering ? scattering->rank() == 0 : !broadcasting || broadcasting->rank() == 0;
  state.ranks = {rank};
  const std::string mine = describe(state.sampler, options);
  if (scattering) {
    require_equal(*scattering, mine, "scatters");
    state.ranks.clear();
    for (const auto& each : scattering->all_gather_object(c10::IValue(int64_t{rank})))
      state.ranks.push_back(static_cast<int>(each.toInt()));
  }
  if (broadcasting) require_equal(*broadcasting, text(mine, ", rank ", rank), "broadcasts");
}

GroupReading::~GroupReading() = default;

bool GroupReading::reads() const {
  return state_->reads;
}

std::vector<DistributedSampler> GroupReading::samplers() const {
  std::vector<DistributedSampler> samplers;
  const auto& mine = state_->sampler;
  if (state_->reads)
    for (int rank : state_->ranks)
      samplers.emplace_back(mine.dataset_size(), rank, mine.num_replicas(), mine.options());
  return samplers;
}

void GroupReading::agree(const std::string& error) const {
  const auto& [scattering, broadcasting] = state_->groups;
  std::string said = error;
  if (scattering) said = scattering->broadcast_object(c10::IValue(said), 0).toStringRef();
  if (broadcasting) said = broadcasting->broadcast_object(c10::IValue(said), 0).toStringRef();
  if (!said.empty()) throw Error(text("GroupLoader: where it reads: ", said));
}

uint64_t GroupReading::begin(std::vector<DistributedSampler>& samplers) {
  State& state = *state_;
  state.sampler.reset();
  for (auto& sampler : samplers) follow(sampler, state.sampler);
  return ++state.loop;
}

Parcel GroupReading::exchange(uint64_t loop, std::vector<Parcel> parcels) {
  State& state = *state_;
  if (loop != state.loop)
    throw UsageError("GroupLoader: another loop over this loader has begun; use a loader for each");
  const auto& [scattering, broadcasting] = state.groups;
  refuse_unequal_ends(parcels);
  Parcel mine;
  if (scattering)
    mine = scatter(*scattering, std::move(parcels));
  else if (state.reads)
    mine = std::move(parcels.front());
  if (broadcasting) mine = broadcast(*broadcasting, std::move(mine));

  if (mine.kind == Kind::kError) throw Error(text("GroupLoader: where it reads: ", mine.bytes));
  if (mine.kind == Kind::kBatch)
    state.sampler.next(static_cast<size_t>(mine.samples));
  else if (state.sampler.position() < state.sampler.size())
    state.sampler.next(state.options.batch_size);  // what drop_last leaves out: the epoch is over
  return mine;
}

size_t GroupReading::size() const {
  return batches_in(state_->sampler.size(), state_->options);
}

}  // namespace lockstep::detail
