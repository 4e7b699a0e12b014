#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/checkpoint_plan.h"

namespace lockstep::bench {

/// The operations that are measured. All sides have the same state.
enum class CheckpointSide {
  kSave,
  kPythonSave,
  kLoad,
  kLoadUnverified,
  kPythonLoad,
  kCopy,        // of the state, into memory that exists already
  kFirstAsync,  // the time that the first asynchronous save() of a CheckpointDirectory blocks
  kLaterAsync,  // the same of a later save()
};

/// The name in the table, such as "python save"; with '_' for spaces it is the prefix of JSON keys.
const char* name_of(CheckpointSide side);

/// The measurements of one run.
struct CheckpointReport {
  int64_t parameter_bytes = 0;
  int64_t state_bytes = 0;
  size_t tensors = 0;
  int threads = 1;
  std::string folder{};
  bool has_sha_instructions = false;
  double sha256_gbps = 0;  // of one thread, like crc32_gbps
  double crc32_gbps = 0;
  std::string libtorch{};
  std::string python_torch{};  // empty if Python was not measured
  bool is_checked = true;
  int64_t wrong = 0;  // parameters whose tensors were wrong after loading, in all rounds
  std::map<CheckpointSide, std::vector<double>> times_us{};  // one entry per round

  size_t rounds() const;
  /// The time of `side` relative to `base`: the median of the ratios of all rounds. None if either was not measured.
  std::optional<double> ratio(CheckpointSide side, CheckpointSide base) const;
};

/// Whether /proc/cpuinfo lists instructions for SHA-256: sha_ni on x86-64, sha2 on arm64.
bool has_sha_instructions(std::string_view cpuinfo);

/// One JSON object, without a newline.
std::string to_json_line(const CheckpointReport& report);

/// Lines that describe the measurement, for the beginning of the table. Lines that are not rows start with '#'.
std::string checkpoint_conditions(const CheckpointReport& report, const std::string& processor);

/// The table of times, and the comparison of the sides.
std::string checkpoint_table(const CheckpointReport& report);

}  // namespace lockstep::bench
