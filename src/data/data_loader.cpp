#include <lockstep/data_loader.h>

#include <algorithm>
#include <exception>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <lockstep/environment.h>
#include <lockstep/error.h>

#include "base/error.h"
#include "base/mix_bits.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "data/batch_queue.h"

namespace lockstep::detail {
namespace {

/// The rank in messages of a loader that has no group.
std::optional<int> rank_of_process() {
  try {
    const auto environment = Environment::detect();
    if (environment.source != Environment::kSingleProcess) return environment.rank;
  } catch (const UsageError&) {
    // init_process_group() reports it.
  }
  return std::nullopt;
}

[[noreturn]] void refuse(std::optional<int> rank, const std::string& message) {
  if (rank) throw UsageError(*rank, message);
  throw UsageError(message);
}

void check_number_of_batches(std::optional<int> rank, size_t samples, const DataLoaderOptions& options) {
  if (options.drop_last && samples < static_cast<size_t>(options.batch_size))
    refuse(rank, text("DataLoader: drop_last leaves no batch: this rank has ", samples,
                      " samples per epoch, batch_size is ", options.batch_size, "; use a smaller batch_size"));
}

}  // namespace

DistributedSampler sampler_of_own_data(std::optional<size_t> dataset_size, const DataLoaderOptions& options) {
  const auto rank = rank_of_process();
  if (!dataset_size)
    refuse(rank, "DataLoader: the dataset does not know its size; pass a sampler, or use a StreamLoader");
  if (*dataset_size == 0)
    refuse(rank,
           "DataLoader: the dataset of this rank has 0 samples, expected at least 1; check where it was loaded from, "
           "or make no loader on this rank and train in join()");
  return DistributedSampler(*dataset_size, 0, 1, {.shuffle = options.shuffle, .seed = options.seed});
}

void check_loader_options(const DataLoaderOptions& options, const DistributedSampler& sampler,
                          std::optional<size_t> dataset_size, bool finds_tensors) {
  check_loading("DataLoader", sampler.rank(), options, finds_tensors);
  const auto fail = [&](auto... parts) { throw UsageError(sampler.rank(), text("DataLoader: ", parts...)); };
  if (dataset_size && *dataset_size != sampler.dataset_size())
    fail("the sampler was created for ", sampler.dataset_size(), " samples, but the dataset has ", *dataset_size,
         "; create the sampler from this dataset");
  if (options.shuffle || options.seed != 0)
    fail("shuffle is ", options.shuffle, " and seed is ", options.seed,
         ", but the loader has a sampler, which decides on the order; set them in DistributedSamplerOptions");
  check_number_of_batches(sampler.rank(), sampler.size(), options);
}

void check_loading(const char* loader, std::optional<int> rank, const DataLoaderOptions& options, bool finds_tensors) {
  const auto fail = [&](auto... parts) { refuse(rank, text(loader, ": ", parts...)); };
  if (options.batch_size < 1) fail("batch_size is ", options.batch_size, ", expected 1 or more");
  if (options.num_workers < 0) fail("num_workers is ", options.num_workers, ", expected 0 or more");
  if (options.prefetch_factor < 1) fail("prefetch_factor is ", options.prefetch_factor, ", expected 1 or more");
  if ((options.device || options.pin_memory) && !finds_tensors)
    fail(
        "device or pin_memory is set, but lockstep cannot find tensors in this type of batch; give it a function "
        "tensors() (see lockstep/tensors_in.h), or copy batches in the loop");
  if (options.device && options.device->is_cuda() && !at::hasCUDA())
    fail("device is ", *options.device, ", but this process sees no GPU; use the group's device()");
}

bool pins_memory(const DataLoaderOptions& options) {
  return (options.pin_memory || (options.device && options.device->is_cuda())) && at::hasCUDA();
}

size_t batches_in(size_t samples, const DataLoaderOptions& options) {
  const auto batch_size = static_cast<size_t>(options.batch_size), whole = samples / batch_size;
  return options.drop_last || samples % batch_size == 0 ? whole : whole + 1;
}

uint64_t sample_seed(uint64_t seed, int64_t epoch, size_t sample) {
  return mix_bits(mix_bits(mix_bits(seed) + static_cast<uint64_t>(epoch)) + sample);
}

void seed_generator(at::Generator& random, uint64_t seed) {
  auto* generator = at::check_generator<at::CPUGeneratorImpl>(random);
  generator->set_current_seed(seed);  // also drops a normal sample that the last user left in the generator
  auto engine = generator->engine();
  auto data = engine.data();
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15;
  for (size_t i = 0; i < data.state_.size(); ++i) data.state_[i] = static_cast<uint32_t>(mix_bits(seed + i * kStep));
  engine.set_data(data);
  generator->set_engine(engine);
}

std::string name_samples(c10::ArrayRef<size_t> samples) {
  constexpr size_t kNamed = 8;
  std::string named = samples.size() == 1 ? "sample" : "samples";
  for (size_t sample : samples.slice(0, std::min(kNamed, samples.size()))) named += text(" ", sample);
  if (samples.size() > kNamed) named += text(" and ", samples.size() - kNamed, " more");
  return named;
}

void rethrow_about(c10::ArrayRef<size_t> samples) {
  rethrow_with_prefix(std::current_exception(), name_samples(samples) + ": ");
}

struct LoaderCore::State {
  State(DistributedSampler samples_of_rank, bool is_of_user, const DataLoaderOptions& loader_options,
        std::optional<size_t> dataset_size, bool finds_tensors, Make make_batch, OnNext on_next)
      : sampler(std::move(samples_of_rank)),
        has_sampler(is_of_user),
        rank(is_of_user ? sampler.rank() : rank_of_process()),
        options(loader_options),
        make(std::move(make_batch)) {
    if (has_sampler) {
      check_loader_options(options, sampler, dataset_size, finds_tensors);
    } else {
      check_loading("DataLoader", rank, options, finds_tensors);
      check_number_of_batches(rank, sampler.size(), options);
    }
    queue = make_unique_owned<BatchQueue>(
        "DataLoader", options.num_workers,
        static_cast<size_t>(options.num_workers) * static_cast<size_t>(options.prefetch_factor), std::move(on_next));
  }

  size_t batches_of(size_t samples) const { return batches_in(samples, options); }

  Samples batch_of(const Samples& samples, size_t number) const {
    const auto first = samples.begin() + static_cast<std::ptrdiff_t>(number * batch_size);
    const auto left = static_cast<size_t>(samples.end() - first);
    return {first, first + static_cast<std::ptrdiff_t>(std::min(batch_size, left))};
  }

  // The sampler advances when the loop receives a batch, not when a worker prefetches it, so that its saved position is
  // the loop's.
  void advance_sampler() {
    const auto expected = batch_of(*samples, delivered++);
    const auto taken = sampler.next(expected.size());
    if (!taken || *taken != expected)
      refuse(rank,
             "DataLoader: its sampler was moved during the loop (next(), reset() or load() was called); use one "
             "sampler for each loader");
    if (delivered == batches_of(samples->size()) && samples->size() % batch_size != 0 && options.drop_last)
      sampler.next(batch_size);  // skips the samples that drop_last drops: the epoch is over
  }

  DistributedSampler sampler;
  const bool has_sampler;         // of the user
  const std::optional<int> rank;  // for messages
  const DataLoaderOptions options;
  const size_t batch_size = static_cast<size_t>(options.batch_size);
  const Make make;
  uint64_t loop = 0;
  std::shared_ptr<const Samples> samples{};  // of this loop
  size_t delivered = 0;                      // batches of this loop
  OwnedPointer<BatchQueue> queue{};          // last: its workers use the members above
};

LoaderCore::LoaderCore(DistributedSampler sampler, bool has_sampler, const DataLoaderOptions& options,
                       std::optional<size_t> dataset_size, bool finds_tensors, Make make, OnNext on_next)
    : state_(std::make_unique<State>(std::move(sampler), has_sampler, options, dataset_size, finds_tensors,
                                     std::move(make), std::move(on_next))) {}

LoaderCore::~LoaderCore() = default;

uint64_t LoaderCore::begin() {
  State& state = *state_;
  if (!state.has_sampler) state.sampler.advance_epoch();
  state.sampler.reset();
  const int64_t epoch = state.sampler.epoch();
  auto samples = state.sampler.indices();
  samples.erase(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(state.sampler.position()));
  state.samples = std::make_shared<const Samples>(std::move(samples));
  state.delivered = 0;
  state.queue->start(
      state.batches_of(state.samples->size()), [&state, epoch, samples = state.samples](int worker, size_t number) {
        try {
          return state.make(worker, state.batch_of(*samples, number), epoch);
        } catch (...) {
          const auto named = state.rank ? text("rank ", *state.rank, ": ") : std::string();
          rethrow_with_prefix(std::current_exception(), text(named, "DataLoader: epoch ", epoch, ": "), "", state.rank);
        }
      });
  return ++state.loop;
}

LoaderCore::Batch LoaderCore::next(uint64_t loop) {
  State& state = *state_;
  if (loop != state.loop)
    refuse(state.rank, "DataLoader: another loop over this loader has started; use one loader for each loop");
  auto batch = state.queue->next();
  if (batch) state.advance_sampler();
  return batch;
}

size_t LoaderCore::size() const {
  return state_->batches_of(state_->sampler.size());
}

DistributedSampler LoaderCore::sampler() const {
  return state_->sampler;
}

bool LoaderCore::has_sampler() const {
  return state_->has_sampler;
}

std::chrono::nanoseconds LoaderCore::waited() const {
  return state_->queue->waited();
}

}  // namespace lockstep::detail
