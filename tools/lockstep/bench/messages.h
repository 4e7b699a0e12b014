#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace lockstep::bench {

/// What rank 0 tells lockstep, a line of JSON for each.

/// A size begins.
struct Progress {
  int64_t bytes = 0;
  bool operator==(const Progress&) const = default;
};

/// How long a flag takes from rank 0 to rank 1 and back; no times when there is no rank 1.
struct RoundTrip {
  std::vector<double> times_us{};
  bool operator==(const RoundTrip&) const = default;
};

/// How long all ranks together take to read and write memory of this size, each its own.
struct Stream {
  int64_t bytes = 0;
  std::vector<double> times_us{};
  bool operator==(const Stream&) const = default;
};

/// One backend's calls with messages of one size; a time is that of one call on the slowest rank.
struct Samples {
  std::string backend{};
  std::string memory{};
  int64_t bytes = 0;
  int calls = 1;                   // in each sample
  std::optional<int64_t> wrong{};  // elements on all ranks in all samples; none: not checked
  std::vector<double> times_us{};
  bool operator==(const Samples&) const = default;
};

/// In this order: the round trip; for each size its progress, stream and samples.
using Message = std::variant<Progress, RoundTrip, Stream, Samples>;

std::string to_line(const Message& message);  // without a line end
Message message_from(const std::string& line);

}  // namespace lockstep::bench
