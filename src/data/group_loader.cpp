#include <lockstep/group_loader.h>

#include <algorithm>
#include <concepts>
#include <exception>
#include <sstream>
#include <utility>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "data/linked_groups.h"

// A step of the loop, on every rank of the groups:
//   1. The reader takes the next batches from its DataLoaders. It sends each rank a header: the number of samples and
//      bytes, and the capacity that all receive buffers need. A reader that failed sends messages without samples.
//   2. If the capacity grows, every rank allocates its buffer, and the ranks agree that none has failed. Otherwise a
//      rank without memory could not take part in the next call.
//   3. The reader sends the batches.
//   4. Every rank unpacks its batch and copies it to its device. The ranks agree that none has failed; only then the
//      samplers advance and the loop gets the batch.
// A rank that fails locally continues with these calls and without its own work, so that no rank waits for it. When
// the ranks know that a rank has failed, they exchange the reason and all throw it. The agreement in 4 is one
// all-reduce of one number, or three small calls if batches are scattered and broadcast.

namespace lockstep::detail {
namespace {

// The reader's description of a message.
struct Header {
  enum { kSamples, kBytes, kCapacity, kCount };
  at::Tensor numbers = at::empty({kCount}, at::kLong);

  int64_t& operator[](int which) const { return numbers.data_ptr<int64_t>()[which]; }
};

constexpr const char* kOtherLoop = "another loop over this loader has started; use one loader for each loop";

Header header_of(const BatchMessage& message, int64_t capacity) {
  const Header header;
  header[Header::kSamples] = message.samples;
  header[Header::kBytes] = static_cast<int64_t>(message.bytes.size());
  header[Header::kCapacity] = capacity;
  return header;
}

// Returns a tensor that shares the memory of `bytes`.
at::Tensor bytes_as_tensor(std::string& bytes) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte);
}

// Returns the capacity for the largest message, with room for slightly larger ones if it must grow.
int64_t capacity_for(const std::vector<BatchMessage>& messages, int64_t current) {
  size_t largest = 0;
  for (const auto& message : messages) largest = std::max(largest, message.bytes.size());
  const auto needed = static_cast<int64_t>(largest);
  return needed <= current ? current : needed + needed / 8;
}

std::string describe_loading(const DistributedSampler& sampler, const DataLoaderOptions& options) {
  return text("samples ", sampler.dataset_size(), ", order ",
              sampler.order() ? sampler.order()->name() : "of the sampler", ", replicas ", sampler.num_replicas(),
              ", shuffle ", sampler.options().shuffle, ", seed ", sampler.options().seed, ", tail ",
              static_cast<int>(sampler.options().tail), ", batch_size ", options.batch_size, ", drop_last ",
              options.drop_last);
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

// All ranks must have the same number of batches: otherwise a rank would wait for messages that never arrive.
void require_equal_batches(const DistributedSampler& sampler, const std::vector<int>& ranks,
                           const DataLoaderOptions& options) {
  if (sampler.options().tail != Tail::kExact) return;  // all ranks have the same number of samples
  const auto batches_of = [&](int rank) { return batches_in(sampler.for_rank(rank).size(), options); };
  for (int rank : ranks)
    if (batches_of(rank) != batches_of(ranks[0]))
      throw MismatchError(text("rank ", ranks[0], " has ", batches_of(ranks[0]), " batches per epoch, but rank ", rank,
                               " has ", batches_of(rank), "; use Tail::kPad or Tail::kDrop"));
}

// Adds its own lifetime to `total`.
class Stopwatch {
 public:
  explicit Stopwatch(std::chrono::nanoseconds& total) : total_(total) {}
  ~Stopwatch() { total_ += std::chrono::steady_clock::now() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  std::chrono::nanoseconds& total_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// The work of this rank in a collective call: after its first failure it does nothing more.
struct LocalWork {
  template <class Action>
  void run(const LinkedGroups& groups, const char* doing, const Action& action) {
    run(
        groups, [&] { return std::string(doing); }, action);
  }
  template <class Describe, class Action>
  requires std::invocable<Describe&>
  void run(const LinkedGroups& groups, const Describe& doing, const Action& action) {
    if (failure) return;
    try {
      action();
    } catch (...) {
      failure = groups.failure(std::current_exception(), doing());
    }
  }
  std::optional<GroupFailure> failure{};
};

}  // namespace

struct GroupReading::State {
  [[noreturn]] void fail(const std::optional<GroupFailure>& own_failure) {
    const auto agreed = groups.agree(own_failure);
    is_over = is_over || !agreed->is_stale;
    groups.throw_on_all_ranks(*agreed);
  }

  // A failure of this check does not break the groups: the rank takes part in the step, and reports it at its end.
  void check_step(uint64_t number, LocalWork& work) const {
    work.run(groups, "", [&] {
      if (number != loop) throw UsageError(kOtherLoop);
    });
    if (work.failure) work.failure->is_stale = true;
    work.run(groups, "", [&] {
      if (sampler.position() != position)
        throw UsageError(text("its sampler was moved during the loop from position ", position, " to ",
                              sampler.position(),
                              " (next(), reset() or load() was called); use one sampler for each "
                              "loader"));
    });
  }

  void require_current(uint64_t number) const {
    if (number != loop) throw UsageError(groups.rank(), text("GroupLoader: ", kOtherLoop));
  }

  Header send_header(const std::vector<BatchMessage>& messages) const {
    Header own_header;
    const int64_t needed = capacity_for(messages, capacity);
    if (groups.reads()) own_header = header_of(messages.front(), needed);
    if (groups.scatter()) {
      std::vector<at::Tensor> headers;
      for (const auto& message : messages) headers.push_back(header_of(message, needed).numbers);
      groups.scatter()->scatter(own_header.numbers, headers, 0);
    }
    if (groups.broadcast()) groups.broadcast()->broadcast(own_header.numbers, 0);
    return own_header;
  }

  // Returns this rank's batch, in the buffer, or in `messages` if this rank reads for itself.
  std::string_view send_batch(std::vector<BatchMessage>& messages, const Header& header) const {
    at::Tensor own_batch;
    if (groups.scatter()) {
      std::vector<at::Tensor> batches;
      for (auto& message : messages) batches.push_back(bytes_as_tensor(message.bytes));
      own_batch = buffer.narrow(0, 0, header[Header::kBytes]);
      groups.scatter()->scatter(own_batch, batches, 0);
    } else {
      own_batch =
          groups.reads() ? bytes_as_tensor(messages.front().bytes) : buffer.narrow(0, 0, header[Header::kBytes]);
    }
    if (groups.broadcast()) groups.broadcast()->broadcast(own_batch, 0);
    return {static_cast<const char*>(own_batch.data_ptr()), static_cast<size_t>(own_batch.numel())};
  }

  void grow(int64_t needed, LocalWork& work) {
    const auto doing = [&] { return text(describe_position(), ": cannot allocate ", needed, " bytes for a batch"); };
    work.run(groups, doing, [&] {
      if (!groups.reads() || groups.scatter()) buffer = at::empty({needed}, at::kByte);
    });
    if (groups.any(work.failure.has_value())) fail(work.failure);
    capacity = needed;
  }

  void advance(int64_t samples) {
    if (samples > 0)
      sampler.next(static_cast<size_t>(samples));
    else if (sampler.position() < sampler.size())
      sampler.next(
          static_cast<size_t>(options.batch_size));  // skips the samples that drop_last drops: the epoch is over
    position = sampler.position();
    is_over = samples == 0;
  }

  // "epoch 3: samples 4 10 16": the position of this rank's loop.
  std::string describe_position() const {
    if (sampler.epoch() != epoch || position >= sampler.size()) return text("epoch ", epoch);
    const auto indices = sampler.indices();
    const auto batch = c10::ArrayRef<size_t>(indices).slice(position);
    return text("epoch ", epoch, ": ",
                name_samples(batch.slice(0, std::min(static_cast<size_t>(options.batch_size), batch.size()))));
  }

  DistributedSampler sampler;
  const DataLoaderOptions options;
  const LinkedGroups groups;
  std::vector<int> ranks{};  // sampler ranks of the ranks for which this rank reads; constant after construction
  uint64_t loop = 0;
  bool is_over = true;                            // the loop, on all ranks
  int64_t epoch = 0;                              // of the loop
  size_t position = 0;                            // of the loop in its epoch
  at::Tensor buffer = at::empty({0}, at::kByte);  // receives this rank's batches
  int64_t capacity = 0;                           // of the buffers, the same on all ranks
  std::chrono::nanoseconds waited{0};
};

GroupReading::GroupReading(ReadingGroups groups, DistributedSampler sampler, const DataLoaderOptions& options,
                           bool finds_tensors) {
  const int rank = sampler.rank();
  state_ = std::make_unique<State>(State{std::move(sampler), options, LinkedGroups(groups, rank)});
  State& state = *state_;
  const auto& scattering = state.groups.scatter();
  const auto& broadcasting = state.groups.broadcast();

  LocalWork work;
  work.run(state.groups, "invalid options",
           [&] { check_loader_options(options, state.sampler, std::nullopt, finds_tensors); });
  work.run(state.groups, "", [&] {
    if (scattering && broadcasting && broadcasting->rank() != 0)
      throw MismatchError(
          text("rank ", broadcasting->rank(),
               " of the group that broadcasts is also in the group that scatters; the group that scatters may contain "
               "only rank 0 of each group that broadcasts"));
  });
  const auto own_options = describe_loading(state.sampler, options);
  state.groups.require_none(work.failure, {"options", text(own_options, ", rank ", rank), own_options});

  state.ranks = scattering ? scattering->all_gather(rank) : std::vector{rank};
  work.run(state.groups, "", [&] { require_equal_batches(state.sampler, state.ranks, options); });
  state.groups.require_none(work.failure);
}

GroupReading::~GroupReading() = default;

void GroupReading::on_readers(const char* doing, const std::function<void()>& action) const {
  LocalWork work;
  if (state_->groups.reads()) work.run(state_->groups, doing, action);
  state_->groups.require_none(work.failure);
}

std::vector<DistributedSampler> GroupReading::samplers() const {
  std::vector<DistributedSampler> samplers;
  for (int rank : state_->ranks) samplers.push_back(state_->sampler.for_rank(rank));
  return samplers;
}

void GroupReading::place(std::vector<DistributedSampler>& samplers) const {
  for (auto& sampler : samplers) follow(sampler, state_->sampler);
}

// The reading rank reads at its own position, so all ranks must have the same position.
uint64_t GroupReading::begin() {
  State& state = *state_;
  state.is_over = true;
  LocalWork work;
  state.epoch = state.sampler.epoch();
  const auto doing = [&] { return text("cannot begin epoch ", state.epoch); };
  work.run(state.groups, doing, [&] { state.sampler.reset(); });
  state.position = state.sampler.position();
  const auto where = text("epoch ", state.epoch, ", position ", state.position);
  state.groups.require_none(work.failure, {"samplers", where, where});
  state.is_over = false;
  state.waited = {};
  return ++state.loop;
}

bool GroupReading::next(uint64_t loop, const Read& read, const Unpack& unpack) {
  State& state = *state_;
  const auto& groups = state.groups;
  if (state.is_over) {
    state.require_current(loop);  // no other rank is in a step, so only this rank throws
    return false;
  }
  const Stopwatch stopwatch(state.waited);
  LocalWork work;
  state.check_step(loop, work);

  std::vector<BatchMessage> messages;
  if (groups.reads()) {
    work.run(groups, "cannot read a batch", [&] { messages = read(); });
    if (work.failure) messages.assign(state.ranks.size(), {});
  }
  const auto header = state.send_header(messages);
  const auto samples = header[Header::kSamples];
  if (header[Header::kCapacity] > state.capacity) state.grow(header[Header::kCapacity], work);

  const auto bytes = state.send_batch(messages, header);
  if (samples > 0)
    work.run(
        groups, [&] { return state.describe_position() + ": cannot deliver the batch"; }, [&] { unpack(bytes); });
  if (groups.any(work.failure.has_value())) state.fail(work.failure);
  state.advance(samples);
  return samples > 0;
}

size_t GroupReading::size() const {
  return batches_in(state_->sampler.size(), state_->options);
}

DistributedSampler GroupReading::sampler() const {
  return state_->sampler;
}

std::chrono::nanoseconds GroupReading::waited() const {
  return state_->waited;
}

}  // namespace lockstep::detail
