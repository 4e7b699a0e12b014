// Overview.
//
// Each worker has its own BatchQueue with one thread, because a stream can only be read in order, by one thread.
// The worker makes the batches of its parts in the order of next_part(). The loop chooses the part of each batch with
// the same function among all parts of the rank, and gets the next batch from the queue of that part's worker. Worker
// and loop agree: leaving out parts does not change the order of the remaining parts. So no thread notifies another of
// the next part, and the order does not depend on timing. The end of a part is an item in the queue, like a batch.
//
// If ranks end together, each step begins with an all-reduce of the rank's outcome: a batch, the end or an error. The
// worst outcome is that of all ranks.

#include <lockstep/stream_loader.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/mix_bits.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "data/batch_queue.h"
#include "data/stream_position.h"

namespace lockstep::detail {
namespace {

using StreamClock = std::chrono::steady_clock;

StreamLoaderOptions checked_stream_options(const ProcessGroup& group, StreamLoaderOptions options, bool finds_tensors) {
  if (!group.contains_me())
    throw UsageError(text("StreamLoader: this process is not in the group '", group.name(),
                          "'; create the loader on the ranks of the group"));
  check_loading("StreamLoader", group.rank(), loading_options(options), finds_tensors);
  const auto fail = [&](auto... parts) { throw UsageError(group.rank(), text("StreamLoader: ", parts...)); };
  if (options.max_batches < 0) fail("max_batches is ", options.max_batches, ", expected 0 or more");
  if (options.parts < 0 || options.parts % group.size() != 0)
    fail("parts is ", options.parts, ", expected a multiple of the ", group.size(), " ranks, or 0");
  if (options.parts == 0) options.parts = group.size() * std::max(options.num_workers, 1);
  return options;
}

}  // namespace

/// The outcome of a step. A greater value prevails over a smaller one.
enum class StreamOutcome : int64_t { kBatch, kEnd, kError };

/// A batch of a part, or its end.
struct StreamItem {
  size_t part = 0;  // the number of the part on this rank
  PartReader::Read read{};
};

/// The parts of one worker in one loop. Used by one thread at a time.
class WorkerParts {
 public:
  WorkerParts(int rank, int64_t batch_size, const StreamCore::Open& open)
      : rank_(rank), batch_size_(batch_size), open_(open) {}

  void add(size_t number, const StreamPart& part, const PartPosition& position) {
    numbers_.push_back(number);
    parts_.push_back(part);
    positions_.push_back(position);
    readers_.emplace_back();
  }

  /// Returns the next item; null if all parts have ended.
  std::shared_ptr<StreamItem> next() {
    const auto i = next_part(positions_, batch_size_);
    if (!i) return nullptr;
    auto item = std::make_shared<StreamItem>(StreamItem{numbers_[*i], read(*i)});
    auto& position = positions_[*i];
    position.samples += item->read.samples;
    if (item->read.batch) return item;
    position.has_ended = true;
    readers_[*i].reset();  // closes the stream
    return item;
  }

 private:
  PartReader::Read read(size_t i) {
    const auto& part = parts_[i];
    try {
      if (!readers_[i]) readers_[i] = open_(part, positions_[i].samples);
      return readers_[i]->next();
    } catch (...) {
      rethrow_with_prefix(std::current_exception(),
                          text("rank ", rank_, ": StreamLoader: epoch ", part.epoch, ": part ", part.index, ": "), "",
                          rank_);
    }
  }

  const int rank_;
  const int64_t batch_size_;
  const StreamCore::Open& open_;
  // One element for each part.
  std::vector<size_t> numbers_{};
  std::vector<StreamPart> parts_{};
  std::vector<PartPosition> positions_{};
  std::vector<std::unique_ptr<PartReader>> readers_{};
};

DataLoaderOptions loading_options(const StreamLoaderOptions& options) {
  return {.batch_size = options.batch_size,
          .drop_last = options.drop_last,
          .num_workers = options.num_workers,
          .prefetch_factor = options.prefetch_factor,
          .pin_memory = options.pin_memory,
          .device = options.device};
}

void rethrow_from(const char* function) {
  rethrow_with_prefix(std::current_exception(), text(function, ": "));
}

void refuse_shorter_stream(int64_t samples, int64_t skipped) {
  throw UsageError(text("the stream ends after ", samples, " samples, but ", skipped,
                        " were received before the state was saved; resume with the same data"));
}

struct StreamCore::State {
  State(ProcessGroup ranks, const StreamLoaderOptions& loader_options, bool finds_tensors, Open open_part,
        const LoaderCore::OnNext& on_next)
      : group(std::move(ranks)),
        options(checked_stream_options(group, loader_options, finds_tensors)),
        open(std::move(open_part)),
        parts(static_cast<size_t>(options.parts / group.size())) {
    position.parts.resize(parts);
    const size_t threads = std::min(static_cast<size_t>(std::max(options.num_workers, 1)), parts);
    const auto on_next_item = [on_next](void* item) {
      if (const auto& batch = static_cast<StreamItem*>(item)->read.batch) on_next(batch.get());
    };
    for (size_t i = 0; i < threads; ++i)
      queues.push_back(make_unique_owned<BatchQueue>("StreamLoader", options.num_workers > 0 ? 1 : 0,
                                                     static_cast<size_t>(options.prefetch_factor), on_next_item));
  }

  StreamLayout layout() const { return {options.parts, options.batch_size, static_cast<int64_t>(options.seed)}; }

  StreamPart part(size_t number) const {
    const int index = group.rank() + static_cast<int>(number) * group.size();
    return {index, options.parts, position.epoch,
            sample_seed(options.seed, position.epoch, static_cast<size_t>(index))};
  }

  void start() {
    for (size_t worker = 0; worker < queues.size(); ++worker) {
      auto worker_parts = std::make_shared<WorkerParts>(group.rank(), options.batch_size, open);
      for (size_t i = worker; i < parts; i += queues.size()) worker_parts->add(i, part(i), position.parts[i]);
      queues[worker]->start(std::numeric_limits<size_t>::max(),
                            [worker_parts](int, size_t) { return worker_parts->next(); });
    }
    is_running = true;
  }

  // Drops the batches that the workers have read, and closes the streams.
  void stop() {
    is_running = false;
    for (auto& queue : queues) queue->start(0, {});
  }

  // Returns the next batch of this rank; none at its end.
  StreamItem take() {
    if (options.max_batches > 0 && position.steps >= options.max_batches) return {};
    while (const auto next = next_part(position.parts, options.batch_size)) {
      const auto item = std::static_pointer_cast<StreamItem>(queues[*next % queues.size()]->next());
      if (item->read.batch) return std::move(*item);
      position.parts[*next].has_ended = true;
    }
    return {};
  }

  bool ends_together() const { return options.end == StreamEnd::kTogether && group.size() > 1; }
  StreamOutcome worst_outcome(StreamOutcome own_outcome, const std::exception_ptr& error);
  std::string describe() const;
  std::vector<c10::IValue> gather_before_throwing(const c10::IValue& own_value) const;
  [[noreturn]] void throw_mismatch() const;
  [[noreturn]] void throw_on_all_ranks(const std::exception_ptr& own_error) const;

  // Constant after construction.
  const ProcessGroup group;
  const StreamLoaderOptions options;
  const Open open;
  const size_t parts;  // of this rank

  int64_t epoch = 0;          // that the next loop begins
  StreamPosition position{};  // of the current or last loop, or the loaded one
  bool is_loaded = false;     // the next loop begins at `position`
  bool is_running = false;    // the current loop has not ended
  uint64_t loop = 0;
  std::chrono::nanoseconds waited{0};
  std::vector<OwnedPointer<BatchQueue>> queues{};  // last: their workers use the members above
};

std::string StreamCore::State::describe() const {
  return text("epoch ", position.epoch, ", batch ", position.steps, ", parts ", options.parts, ", batch_size ",
              options.batch_size, ", seed ", options.seed, ", max_batches ", options.max_batches);
}

// Collective. Throws on all ranks if the ranks do not have the same options and position.
StreamOutcome StreamCore::State::worst_outcome(StreamOutcome own_outcome, const std::exception_ptr& error) {
  uint64_t digest = 0;
  for (const int64_t number :
       {position.epoch, position.steps, layout().parts, layout().batch_size, layout().seed, options.max_batches})
    digest = mix_bits(digest + static_cast<uint64_t>(number));
  const auto same = static_cast<int64_t>(digest >> 1);
  const auto device = group.supports(c10::kCPU) ? c10::Device(c10::kCPU) : group.device();
  const auto most = at::tensor({static_cast<int64_t>(own_outcome), same, -same}, at::kLong).to(device);
  group.all_reduce(most, ReduceOp::kMax);
  const auto all = most.cpu();
  const auto* number = all.data_ptr<int64_t>();
  const auto worst = static_cast<StreamOutcome>(number[0]);
  if (number[1] != -number[2]) throw_mismatch();
  if (worst == StreamOutcome::kError) throw_on_all_ranks(error);
  return worst;
}

// Collective. Returns when all ranks have the values: a rank that throws earlier could abort the call on other ranks.
std::vector<c10::IValue> StreamCore::State::gather_before_throwing(const c10::IValue& own_value) const {
  auto all = group.all_gather_object(own_value);
  try {
    group.barrier();
  } catch (const Error&) {
    // Ignored: the exception of the caller is the root cause.
  }
  return all;
}

// Collective.
void StreamCore::State::throw_mismatch() const {
  const auto all = gather_before_throwing(c10::IValue(describe()));
  size_t rank = 1;
  while (rank + 1 < all.size() && all[rank].toStringRef() == all[0].toStringRef()) ++rank;
  throw MismatchError(text("StreamLoader: the loaders differ: rank 0 has ", all[0].toStringRef(), "; rank ", rank,
                           " has ", all[rank].toStringRef(), "; use the same on all ranks"));
}

// Collective. Throws the error of the first rank that has one, on all ranks.
void StreamCore::State::throw_on_all_ranks(const std::exception_ptr& own_error) const {
  const auto all = gather_before_throwing(
      c10::ivalue::Tuple::create({c10::IValue(static_cast<int64_t>(own_error ? kind_of(own_error) : ErrorKind::kError)),
                                  c10::IValue(own_error ? message_of(own_error) : std::string())}));
  size_t rank = 0;
  const auto field = [&](size_t i) { return all[rank].toTupleRef().elements()[i]; };
  while (rank + 1 < all.size() && field(1).toStringRef().empty()) ++rank;
  if (static_cast<int>(rank) == group.rank()) std::rethrow_exception(own_error);
  throw_error(static_cast<ErrorKind>(field(0).toInt()), field(1).toStringRef(), static_cast<int>(rank));
}

StreamCore::StreamCore(ProcessGroup group, const StreamLoaderOptions& options, bool finds_tensors, Open open,
                       const LoaderCore::OnNext& on_next)
    : state_(std::make_unique<State>(std::move(group), options, finds_tensors, std::move(open), on_next)) {}

StreamCore::~StreamCore() = default;

uint64_t StreamCore::begin() {
  State& state = *state_;
  auto& position = state.position;
  const bool continues = std::exchange(state.is_loaded, false) && position.epoch == state.epoch;
  if (!continues) position = {.epoch = state.epoch, .parts = std::vector<PartPosition>(state.parts)};
  state.waited = {};
  state.start();
  return ++state.loop;
}

StreamCore::Batch StreamCore::next(uint64_t loop) {
  State& state = *state_;
  if (loop != state.loop)
    throw UsageError(state.group.rank(),
                     "StreamLoader: another loop over this loader has started, or a state was loaded; use one loader "
                     "for each loop, and load before the loop");
  if (!state.is_running) return nullptr;

  StreamItem item;
  std::exception_ptr error;
  const auto begin = StreamClock::now();
  try {
    item = state.take();
  } catch (...) {
    error = std::current_exception();
  }
  state.waited += StreamClock::now() - begin;

  auto outcome = error ? StreamOutcome::kError : item.read.batch ? StreamOutcome::kBatch : StreamOutcome::kEnd;
  try {
    if (state.ends_together()) outcome = state.worst_outcome(outcome, error);
    if (error) std::rethrow_exception(error);
  } catch (...) {
    state.stop();  // the item is lost, so the loop cannot continue
    throw;
  }
  if (outcome == StreamOutcome::kEnd) {
    state.stop();
    state.position.is_finished = true;
    return nullptr;
  }
  // The position advances when the loop receives a batch, not when a worker reads it.
  state.position.parts[item.part].samples += item.read.samples;
  ++state.position.steps;
  return item.read.batch;
}

void StreamCore::set_epoch(int64_t epoch) {
  if (epoch < 0)
    throw UsageError(state_->group.rank(),
                     text("StreamLoader: set_epoch(", epoch, "), expected 0 or more; count epochs from 0"));
  state_->epoch = epoch;
}

int64_t StreamCore::epoch() const {
  return state_->epoch;
}

int64_t StreamCore::next_epoch() const {
  const auto& position = state_->position;
  return state_->epoch + (position.is_finished && position.epoch == state_->epoch ? 1 : 0);
}

Value StreamCore::state_dict() const {
  const State& state = *state_;
  if (state.position.epoch == state.epoch) return save_position(state.group, state.position, state.layout());
  // After set_epoch() the previous epoch is over, even if its loop was left early.
  const StreamPosition begin{.epoch = state.epoch, .parts = std::vector<PartPosition>(state.parts)};
  return save_position(state.group, begin, state.layout());
}

void StreamCore::load_state_dict(const Value& saved) {
  State& state = *state_;
  auto position = load_position(saved, state.group.rank(), state.group.size(), state.layout());
  if (state.is_running) state.stop();
  ++state.loop;  // a loop that is running cannot continue
  state.position = std::move(position);
  state.epoch = state.position.epoch;
  state.is_loaded = !state.position.is_finished;
}

std::chrono::nanoseconds StreamCore::waited() const {
  return state_->waited;
}

}  // namespace lockstep::detail
