#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include <lockstep/state_traits.h>
#include <lockstep/tensors_in.h>
#include <lockstep/training_run.h>
#include <lockstep/value.h>

namespace lockstep {

class TrainingRun::StepGuard {
 public:
  explicit StepGuard(TrainingRun& run) : run_(run) { run.begin_step(); }
  ~StepGuard() {
    if (!has_ended_) run_.abandon_step();
  }
  StepGuard(const StepGuard&) = delete;
  StepGuard& operator=(const StepGuard&) = delete;
  void end() {
    has_ended_ = true;
    run_.end_step();
  }

 private:
  TrainingRun& run_;
  bool has_ended_ = false;
};

/// The program waits for a batch while this object exists.
class TrainingRun::WaitGuard {
 public:
  explicit WaitGuard(TrainingRun& run) : run_(run) { run.begin_wait(); }
  ~WaitGuard() { run_.end_wait(); }
  WaitGuard(const WaitGuard&) = delete;
  WaitGuard& operator=(const WaitGuard&) = delete;

 private:
  TrainingRun& run_;
};

template <class Body>
std::invoke_result_t<Body&> TrainingRun::step(Body&& body) {
  StepGuard guard(*this);
  if constexpr (std::is_void_v<std::invoke_result_t<Body&>>) {
    body();
    guard.end();
  } else {
    auto result = body();
    guard.end();
    return result;
  }
}

namespace detail {

/// A range that saves its own position, such as a StreamLoader.
template <class Range>
concept HasEpochs = HasStateDict<Range> && requires(Range& range) {
  range.set_epoch(int64_t{});
  { range.epoch() == range.next_epoch() } -> std::convertible_to<bool>;
};

/// The result of TrainingRun::batches().
template <class Range>
class RunBatches {
  using Inner = decltype(std::begin(std::declval<Range&>()));
  using InnerEnd = decltype(std::end(std::declval<Range&>()));
  using Clock = std::chrono::steady_clock;
  static constexpr bool kHasSize = requires(Range & range) {
    { range.size() } -> std::convertible_to<int64_t>;
  };

 public:
  RunBatches(TrainingRun& run, Range& range) : run_(run), range_(range) {}

  /// An input iterator.
  class Iterator {
   public:
    decltype(auto) operator*() const { return **at_; }
    Iterator& operator++() {
      fetch([&] { ++*at_; });
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return is_at_end_; }

   private:
    friend RunBatches;
    explicit Iterator(RunBatches& batches) : run_(batches.run_), range_(batches.range_) {
      const auto skipped = run_.begin_loop(batches.describe());
      if (!skipped || run_.is_stopping()) return;
      fetch([&] {
        at_.emplace(std::begin(range_));
        if constexpr (kHasSize) run_.check_batches(static_cast<int64_t>(range_.size()));
        for (int64_t i = 0; i < *skipped && *at_ != std::end(range_); ++i) ++*at_;
      });
    }

    template <class Advance>
    void fetch(const Advance& advance) {
      is_at_end_ = run_.is_stopping();
      if (is_at_end_) return;
      const auto begin = Clock::now();
      {
        const TrainingRun::WaitGuard waiting(run_);
        advance();
        is_at_end_ = !(*at_ != std::end(range_));
      }
      if (is_at_end_) return run_.end_loop();
      using Batch = std::remove_cvref_t<decltype(**at_)>;
      run_.took_batch(samples_in<Batch>(**at_), Clock::now() - begin);
    }

    TrainingRun& run_;
    Range& range_;
    std::optional<Inner> at_{};
    bool is_at_end_ = true;
  };

  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  TrainingRun::Loop describe() {
    TrainingRun::Loop loop;
    if constexpr (kHasSize) loop.batches = static_cast<int64_t>(range_.size());
    if constexpr (requires { range_.sampler().set_epoch(int64_t{}); }) {
      auto sampler = range_.sampler();  // shares its state with the loader's
      using Sampler = decltype(sampler);
      sampler.set_epoch(run_.epoch());
      if constexpr (requires { range_.has_sampler(); })
        if (!range_.has_sampler()) return loop;  // the position of rank 0 is not that of other ranks
      loop.save = [sampler] { return StateTraits<Sampler>::save(sampler); };
      loop.load = [sampler](const Value& position) mutable {
        StateTraits<Sampler>::load(sampler, position);
        return sampler.next_epoch() == sampler.epoch();
      };
    } else if constexpr (HasEpochs<Range>) {
      Range& range = range_;
      range.set_epoch(run_.epoch());
      loop.save = [&range] { return range.state_dict(); };
      loop.load = [&range](const Value& position) {
        range.load_state_dict(position);
        return range.next_epoch() == range.epoch();
      };
    }
    return loop;
  }

  TrainingRun& run_;
  Range& range_;
};

}  // namespace detail

}  // namespace lockstep
