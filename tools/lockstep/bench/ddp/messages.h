#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace lockstep::bench {

/// What rank 0 tells lockstep while models are trained, a line of JSON for each.

/// What holds for all models.
struct DdpSetting {
  std::string backend{};   // that `auto` has chosen
  std::string libtorch{};  // its version
  bool has_mkldnn = true;  // whether all sides may use MKL-DNN
  bool operator==(const DdpSetting&) const = default;
};

/// A model begins.
struct DdpProgress {
  std::string model{};
  bool operator==(const DdpProgress&) const = default;
};

/// The steps of one model; a time is that of one step on the slowest rank, one for each round.
struct DdpSamples {
  std::string model{};
  int steps = 1;      // in each sample
  int64_t wrong = 0;  // parameters on all ranks in all samples
  std::vector<double> local_us{};
  std::vector<double> ddp_us{};
  std::vector<double> alone_us{};
  std::vector<double> python_us{};  // empty: not measured
  bool operator==(const DdpSamples&) const = default;
};

/// In this order: the setting; for each model its progress and its samples.
using DdpMessage = std::variant<DdpSetting, DdpProgress, DdpSamples>;

std::string to_line(const DdpMessage& message);  // without a line end
DdpMessage ddp_message_from(const std::string& line);

}  // namespace lockstep::bench
