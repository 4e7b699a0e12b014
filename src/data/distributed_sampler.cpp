#include <lockstep/distributed_sampler.h>

#include <algorithm>
#include <mutex>
#include <string>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize/archive.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/log.h"
#include "base/text.h"

namespace lockstep {
namespace {

size_t samples_of_rank(size_t dataset_size, int rank, int num_replicas, Tail tail) {
  const auto replicas = static_cast<size_t>(num_replicas);
  const size_t whole = dataset_size / replicas;
  const size_t rest = dataset_size % replicas;
  switch (tail) {
    case Tail::kPad:
      return whole + (rest > 0 ? 1 : 0);
    case Tail::kDrop:
      return whole;
    case Tail::kExact:
      return whole + (static_cast<size_t>(rank) < rest ? 1 : 0);
  }
  throw UsageError(text("tail is ", static_cast<int>(tail), "; use Tail::kPad, Tail::kDrop or Tail::kExact"));
}

void check_dataset_size(size_t dataset_size, int num_replicas, Tail tail, const std::string& what = "the dataset") {
  if (dataset_size == 0) {
    throw UsageError(
        text("DistributedSampler: ", what, " has 0 samples, expected at least 1; check where it was loaded from"));
  }
  if (tail == Tail::kDrop && dataset_size < static_cast<size_t>(num_replicas)) {
    throw UsageError(
        text("DistributedSampler: Tail::kDrop of ", dataset_size, " samples among ", num_replicas,
             " replicas leaves no samples, expected at least one per replica; use Tail::kPad or fewer ranks"));
  }
}

void check_replica(int rank, int num_replicas) {
  if (num_replicas < 1) {
    throw UsageError(text("DistributedSampler: num_replicas is ", num_replicas,
                          ", expected 1 or more; pass the number of ranks in the group"));
  }
  if (rank < 0 || rank >= num_replicas) {
    throw UsageError(text("DistributedSampler: rank is ", rank, ", expected 0 to ", num_replicas - 1,
                          " (num_replicas is ", num_replicas, "); pass the rank inside the group"));
  }
}

int64_t read_number(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt()) {
    throw UsageError(text("DistributedSampler: the archive has no integer '", key,
                          "', expected an archive that DistributedSampler::save wrote; load the sampler's archive"));
  }
  return value.toInt();
}

bool archive_has(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value);
}

[[noreturn]] void refuse_damaged(int64_t epoch, int64_t position, size_t limit) {
  throw UsageError(text("DistributedSampler: saved at epoch ", epoch, ", position ", position,
                        ", expected an epoch of 0 or more and a position of 0 to ", limit == 0 ? 0 : limit - 1,
                        "; the archive is damaged: use another one"));
}

/// Checks that a position inside an epoch was saved with this order.
void check_same_order(torch::serialize::InputArchive& archive, const std::optional<SampleOrder>& order) {
  c10::IValue saved;
  const std::string saved_order = archive.try_read("order", saved) && saved.isString() ? saved.toStringRef() : "";
  const std::string own_order = order ? order->name() : "";
  const auto named = [](const std::string& name) { return name.empty() ? "no order" : text("the order '", name, "'"); };
  if (saved_order != own_order)
    throw UsageError(text("DistributedSampler: the saved position is inside an epoch with ", named(saved_order),
                          ", this sampler has ", named(own_order),
                          "; resume with the same order, or from the end of an epoch"));
}

// Checks a number that must be equal for a position inside an epoch to denote the same samples.
void check_same(const std::string& what, int64_t saved, int64_t own) {
  if (saved != own) {
    throw UsageError(text("DistributedSampler: the saved position is inside an epoch with ", what, " ", saved,
                          ", this sampler has ", own, "; resume with the same value, or from the end of an epoch"));
  }
}

/// The places in an epoch's order of `size` samples that a rank takes, after the first `start` places. The order
/// repeats cyclically; the ranks take samples from it in turn.
std::vector<size_t> places_of_rank(size_t start, size_t size, int rank, int num_replicas, Tail tail) {
  std::vector<size_t> places(samples_of_rank(size - start, rank, num_replicas, tail));
  size_t turn = start + static_cast<size_t>(rank);
  for (size_t& place : places) {
    place = turn % size;
    turn += static_cast<size_t>(num_replicas);
  }
  return places;
}

/// The samples of a rank among the samples after the first `start` samples of the epoch's order.
std::vector<size_t> indices_from(size_t start, size_t dataset_size, int rank, int num_replicas,
                                 const DistributedSamplerOptions& options, int64_t epoch) {
  auto indices = places_of_rank(start, dataset_size, rank, num_replicas, options.tail);
  if (!options.shuffle || indices.empty()) return indices;

  const auto generator = at::detail::createCPUGenerator(options.seed + static_cast<uint64_t>(epoch));
  const at::Tensor order = at::randperm(static_cast<int64_t>(dataset_size), generator, at::kLong);
  const int64_t* shuffled = order.data_ptr<int64_t>();
  for (size_t& index : indices) index = static_cast<size_t>(shuffled[index]);
  return indices;
}

/// The samples of an epoch. Throws UsageError if there are none, or if the dataset does not have one of them.
std::vector<size_t> checked_order(const SampleOrder& order, int64_t epoch, size_t dataset_size, int num_replicas,
                                  Tail tail) {
  auto samples = order(epoch);
  const auto wrong = std::find_if(samples.begin(), samples.end(), [&](size_t index) { return index >= dataset_size; });
  if (wrong != samples.end())
    throw UsageError(text("DistributedSampler: the order '", order.name(), "' has sample ", *wrong, " in epoch ", epoch,
                          ", but the dataset has ", dataset_size, " samples"));
  check_dataset_size(samples.size(), num_replicas, tail, text("the order '", order.name(), "'"));
  return samples;
}

}  // namespace

std::vector<size_t> distributed_indices(size_t dataset_size, int rank, int num_replicas,
                                        const DistributedSamplerOptions& options, int64_t epoch) {
  return indices_from(0, dataset_size, rank, num_replicas, options, epoch);
}

struct DistributedSampler::State {
  std::mutex mutex;
  // Guarded by mutex.
  size_t dataset_size = 0;
  int64_t epoch = 0;
  int64_t indices_epoch = 0;  // The epoch of `indices`; set_epoch() does not change it, reset() does.
  size_t start = 0;  // Samples of the epoch that all ranks had taken before another number of ranks resumed it.
  std::vector<size_t> indices;  // This rank's samples after `start`, which next() returns.
  size_t position = 0;          // Number of samples of `indices` that next() has returned.
  bool resumed = false;         // load() set a position inside an epoch: the next reset() keeps it.
  bool was_reset = false;
  bool uses_set_epoch = false;
  bool warned = false;
};

DistributedSampler::DistributedSampler(std::optional<SampleOrder> order, size_t dataset_size, int rank,
                                       int num_replicas, const DistributedSamplerOptions& options)
    : rank_(rank),
      num_replicas_(num_replicas),
      options_(options),
      order_(std::move(order)),
      state_(std::make_shared<State>()) {
  check_replica(rank, num_replicas);
  check_dataset_size(dataset_size, num_replicas, order_ ? Tail::kPad : options.tail);
  state_->dataset_size = dataset_size;
  state_->indices = indices_of_rank(0, dataset_size, 0);
}

DistributedSampler::DistributedSampler(size_t dataset_size, int rank, int num_replicas,
                                       DistributedSamplerOptions options)
    : DistributedSampler(std::nullopt, dataset_size, rank, num_replicas, options) {}

DistributedSampler::DistributedSampler(SampleOrder order, size_t dataset_size, int rank, int num_replicas,
                                       DistributedSamplerOptions options)
    : DistributedSampler(std::optional(std::move(order)), dataset_size, rank, num_replicas, options) {}

DistributedSampler::DistributedSampler(SampleOrder order, size_t dataset_size, const ProcessGroup& group,
                                       DistributedSamplerOptions options)
    : DistributedSampler(std::optional(std::move(order)), dataset_size, group.rank(), group.size(), options) {}

DistributedSampler DistributedSampler::for_rank(int rank) const {
  return DistributedSampler(order_, dataset_size(), rank, num_replicas_, options_);
}

DistributedSampler::DistributedSampler(size_t dataset_size, const ProcessGroup& group,
                                       DistributedSamplerOptions options)
    : DistributedSampler(dataset_size, group.rank(), group.size(), options) {}

DistributedSampler::~DistributedSampler() = default;

size_t DistributedSampler::known_size(torch::optional<size_t> size) {
  if (size.has_value()) return *size;
  throw UsageError("DistributedSampler: the dataset does not know its size; pass the number of samples instead");
}

size_t DistributedSampler::samples_in(int64_t epoch, size_t dataset_size) const {
  return order_ ? checked_order(*order_, epoch, dataset_size, num_replicas_, options_.tail).size() : dataset_size;
}

std::vector<size_t> DistributedSampler::indices_of_rank(size_t start, size_t dataset_size, int64_t epoch) const {
  if (!order_) return indices_from(start, dataset_size, rank_, num_replicas_, options_, epoch);
  const auto order = checked_order(*order_, epoch, dataset_size, num_replicas_, options_.tail);
  auto indices = places_of_rank(start, order.size(), rank_, num_replicas_, options_.tail);
  for (size_t& index : indices) index = order[index];
  return indices;
}

void DistributedSampler::set_epoch(int64_t epoch) {
  if (epoch < 0) {
    throw UsageError(text("DistributedSampler: set_epoch(", epoch, "), expected 0 or more; count epochs from 0"));
  }
  const std::lock_guard lock(state_->mutex);
  state_->epoch = epoch;
  state_->uses_set_epoch = true;
}

void DistributedSampler::advance_epoch() {
  const std::lock_guard lock(state_->mutex);
  State& state = *state_;
  if (!state.uses_set_epoch && state.epoch == state.indices_epoch && state.position == state.indices.size())
    ++state.epoch;
  state.warned = true;  // epochs have different orders without set_epoch(), too
}

int64_t DistributedSampler::epoch() const {
  const std::lock_guard lock(state_->mutex);
  return state_->epoch;
}

int64_t DistributedSampler::next_epoch() const {
  const std::lock_guard lock(state_->mutex);
  const bool is_over = state_->epoch == state_->indices_epoch && state_->position == state_->indices.size();
  return state_->epoch + (is_over ? 1 : 0);
}

size_t DistributedSampler::size() const {
  const std::lock_guard lock(state_->mutex);
  return state_->indices.size();
}

size_t DistributedSampler::position() const {
  const std::lock_guard lock(state_->mutex);
  return state_->position;
}

size_t DistributedSampler::dataset_size() const {
  const std::lock_guard lock(state_->mutex);
  return state_->dataset_size;
}

std::vector<size_t> DistributedSampler::indices() const {
  const std::lock_guard lock(state_->mutex);
  return state_->epoch == state_->indices_epoch ? state_->indices
                                                : indices_of_rank(0, state_->dataset_size, state_->epoch);
}

void DistributedSampler::reset(torch::optional<size_t> new_size) {
  bool warn = false;
  {
    const std::lock_guard lock(state_->mutex);
    State& state = *state_;
    const size_t dataset_size = new_size.value_or(state.dataset_size);
    check_dataset_size(dataset_size, num_replicas_, order_ ? Tail::kPad : options_.tail);
    if (order_ && dataset_size != state.dataset_size)
      throw UsageError(text("DistributedSampler: reset with ", dataset_size, " samples, but the order '",
                            order_->name(), "' is for a dataset of ", state.dataset_size, "; make a new sampler"));
    const bool same_list = dataset_size == state.dataset_size && state.epoch == state.indices_epoch;
    const bool continues = same_list && state.resumed;
    if (!same_list || (!continues && state.start > 0)) {
      state.start = 0;
      state.indices = indices_of_rank(0, dataset_size, state.epoch);
    }
    if (!continues) state.position = 0;
    state.dataset_size = dataset_size;
    state.indices_epoch = state.epoch;
    state.resumed = false;
    // All ranks run the same program: only rank 0 warns.
    warn = rank_ == 0 && state.was_reset && !state.uses_set_epoch && !state.warned &&
           (order_ ? (*order_)(state.epoch) != (*order_)(state.epoch + 1) : options_.shuffle);
    state.was_reset = true;
    state.warned = state.warned || warn;
  }
  if (warn) {
    log_warning("DistributedSampler: all epochs use the same order; call sampler.set_epoch(epoch) before each epoch");
  }
}

torch::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  if (batch_size == 0) throw UsageError("DistributedSampler: batch size is 0, expected 1 or more; set batch_size");
  const std::lock_guard lock(state_->mutex);
  state_->resumed = false;
  const size_t count = std::min(batch_size, state_->indices.size() - state_->position);
  if (count == 0) return torch::nullopt;
  const auto first = state_->indices.begin() + static_cast<std::ptrdiff_t>(state_->position);
  state_->position += count;
  return std::vector<size_t>(first, first + static_cast<std::ptrdiff_t>(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const std::lock_guard lock(state_->mutex);
  // After set_epoch() the previous epoch is over, even if the loop ended early.
  const bool is_current = state_->epoch == state_->indices_epoch;
  const size_t position = is_current ? state_->position : 0;
  const auto write = [&archive](const std::string& key, int64_t value) { archive.write(key, c10::IValue(value)); };
  write("epoch", state_->epoch);
  write("position", static_cast<int64_t>(position));
  write("start", is_current ? static_cast<int64_t>(state_->start) : 0);
  write("finished", is_current && position == state_->indices.size() ? 1 : 0);
  write("dataset_size", static_cast<int64_t>(state_->dataset_size));
  write("num_replicas", num_replicas_);
  write("shuffle", options_.shuffle ? 1 : 0);
  write("seed", static_cast<int64_t>(options_.seed));
  write("tail", static_cast<int64_t>(options_.tail));
  if (order_) archive.write("order", c10::IValue(order_->name()));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const int64_t epoch = read_number(archive, "epoch");
  const int64_t position = read_number(archive, "position");
  const int64_t dataset_size = read_number(archive, "dataset_size");
  const bool finished = read_number(archive, "finished") != 0;

  const std::lock_guard lock(state_->mutex);
  if (dataset_size != static_cast<int64_t>(state_->dataset_size)) {
    throw UsageError(text("DistributedSampler: saved with a dataset of ", dataset_size, " samples, this one has ",
                          state_->dataset_size, "; resume with the same dataset"));
  }
  const int64_t start = archive_has(archive, "start") ? read_number(archive, "start") : 0;
  const int64_t replicas = read_number(archive, "num_replicas");
  const bool is_inside = start + position > 0 && !finished;
  if (is_inside) {
    check_same_order(archive, order_);
    if (!order_) check_same("shuffle", read_number(archive, "shuffle"), options_.shuffle ? 1 : 0);
    check_same("seed", read_number(archive, "seed"), static_cast<int64_t>(options_.seed));
    check_same("tail", read_number(archive, "tail"), static_cast<int64_t>(options_.tail));
  }
  if (epoch < 0 || start < 0 || position < 0 || replicas < 1) refuse_damaged(epoch, position, 0);
  const auto samples = static_cast<int64_t>(samples_in(epoch, state_->dataset_size));
  if (is_inside && (start > samples || position > samples)) refuse_damaged(epoch, position, samples);
  // A different number of ranks divides the samples that the ranks of the saving job have not received.
  const bool is_divided_again = !finished && position > 0 && replicas != num_replicas_;
  const int64_t taken = std::min(start + position * replicas, samples);
  const auto begin = static_cast<size_t>(finished ? 0 : is_divided_again ? taken : start);
  const auto next = static_cast<size_t>(is_divided_again ? 0 : position);
  // With Tail::kExact the rank that saved may have had one sample more than this rank, so compare with the first rank.
  const size_t longest = samples_of_rank(static_cast<size_t>(samples) - begin, 0, num_replicas_, options_.tail);
  if (!finished && next > 0 && next >= longest) refuse_damaged(epoch, position, longest);
  state_->indices = indices_of_rank(begin, state_->dataset_size, epoch);
  state_->start = begin;
  state_->epoch = state_->indices_epoch = epoch;
  state_->position = finished ? state_->indices.size() : std::min(next, state_->indices.size());
  state_->resumed = !finished;
}

}  // namespace lockstep
