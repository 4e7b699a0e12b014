#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/data_loader.h>
#include <lockstep/detail/dataset_reading.h>
#include <lockstep/detail/loaded_batch.h>
#include <lockstep/detail/stream_core.h>
#include <lockstep/export.h>

namespace lockstep {

struct StreamPart;

namespace detail {

/// Rethrows the current exception with the name of the function that threw it in the message.
[[noreturn]] LOCKSTEP_EXPORT void rethrow_from(const char* function);
[[noreturn]] LOCKSTEP_EXPORT void refuse_shorter_stream(int64_t samples, int64_t skipped);

template <class Stream>
concept ReadsNext = requires(Stream& stream) {
  stream.next();
};
template <class Stream>
concept Skips = requires(Stream& stream) {
  stream.skip(int64_t{});
};

/// Returns the stream, or the stream that a pointer points to.
template <class Opened>
auto& stream_in(Opened& opened) {
  if constexpr (ReadsNext<Opened>)
    return opened;
  else
    return *opened;
}

template <class Opened>
using SampleIn = std::remove_cvref_t<decltype(*stream_in(std::declval<Opened&>()).next())>;

template <class Open, class Collate>
class StreamReader : public PartReader {
  using Opened = std::invoke_result_t<Open&, const StreamPart&>;
  using Sample = SampleIn<Opened>;
  using Collated = detail::Collated<std::vector<Sample>, Collate>;

 public:
  StreamReader(Open& open, Collate& collate, const DataLoaderOptions& options, const StreamPart& part, int64_t skipped)
      : collate_(collate), options_(options), opened_(opened(open, part)) {
    if (skipped > 0) skip(skipped);
  }

  Read next() override {
    std::vector<Sample> samples;
    while (!has_ended_ && samples.size() < static_cast<size_t>(options_.batch_size)) {
      auto sample = read();
      if (sample)
        samples.push_back(*std::move(sample));
      else
        has_ended_ = true;
    }
    const auto count = static_cast<int64_t>(samples.size());
    if (count == 0 || (options_.drop_last && count < options_.batch_size)) return {};
    using Loaded = LoadedBatch<typename Collated::Batch>;
    auto loaded = std::make_shared<Loaded>(Loaded{collated(std::move(samples))});
    loaded->pin(options_);
    return {std::move(loaded), count};
  }

 private:
  static Opened opened(Open& open, const StreamPart& part) {
    try {
      return open(part);
    } catch (...) {
      rethrow_from("open()");
    }
  }

  // Counts the samples, and names the sample that cannot be read.
  auto read() {
    try {
      auto sample = stream_in(opened_).next();
      if (sample) ++position_;
      return sample;
    } catch (...) {
      rethrow_about(position_);
    }
  }

  void skip(int64_t samples) {
    if constexpr (Skips<std::remove_reference_t<decltype(stream_in(opened_))>>) {
      try {
        stream_in(opened_).skip(samples);
      } catch (...) {
        rethrow_from("skip()");
      }
      position_ = static_cast<size_t>(samples);
    } else {
      for (int64_t i = 0; i < samples; ++i)
        if (!read()) refuse_shorter_stream(i, samples);
    }
  }

  auto collated(std::vector<Sample> samples) {
    const size_t count = samples.size();
    try {
      return Collated::make(collate_, std::move(samples));
    } catch (...) {
      std::vector<size_t> numbers(count);
      std::iota(numbers.begin(), numbers.end(), position_ - count);
      rethrow_about(numbers);
    }
  }

  Collate& collate_;
  const DataLoaderOptions& options_;
  size_t position_ = 0;  // samples of the part that were read or skipped
  bool has_ended_ = false;
  Opened opened_;
};

}  // namespace detail

}  // namespace lockstep
