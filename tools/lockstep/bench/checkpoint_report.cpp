#include "bench/checkpoint_report.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/operation.h"
#include "bench/report_format.h"
#include "doctor/machine.h"

namespace lockstep::bench {
namespace {

using json = nlohmann::ordered_json;

constexpr CheckpointSide kCheckpointSides[] = {CheckpointSide::kSave,       CheckpointSide::kPythonSave,
                                               CheckpointSide::kLoad,       CheckpointSide::kLoadUnverified,
                                               CheckpointSide::kPythonLoad, CheckpointSide::kCopy,
                                               CheckpointSide::kFirstAsync, CheckpointSide::kLaterAsync};

struct Comparison {
  const char* name;  // in the table
  const char* key;   // in JSON
  CheckpointSide side, base;
};

constexpr Comparison kCheckpointRatios[] = {
    {"python save/save", "save_ratio_to_python", CheckpointSide::kPythonSave, CheckpointSide::kSave},
    {"python load/load", "load_ratio_to_python", CheckpointSide::kPythonLoad, CheckpointSide::kLoad},
    {"python load/load unverified", "load_unverified_ratio_to_python", CheckpointSide::kPythonLoad,
     CheckpointSide::kLoadUnverified},
    {"first async/copy", "first_async_ratio_to_copy", CheckpointSide::kFirstAsync, CheckpointSide::kCopy},
    {"later async/copy", "later_async_ratio_to_copy", CheckpointSide::kLaterAsync, CheckpointSide::kCopy}};

constexpr const char* kCheckpointTimes = "{} {:<16} {:>9} {:>9} {:>9} {:>8}\n";

const std::vector<double>* find(const CheckpointReport& report, CheckpointSide side) {
  const auto found = report.times_us.find(side);
  return found == report.times_us.end() || found->second.empty() ? nullptr : &found->second;
}

std::string prefix_of(CheckpointSide side) {
  std::string prefix = name_of(side);
  std::replace(prefix.begin(), prefix.end(), ' ', '_');
  return prefix;
}

}  // namespace

const char* name_of(CheckpointSide side) {
  switch (side) {
    case CheckpointSide::kSave:
      return "save";
    case CheckpointSide::kPythonSave:
      return "python save";
    case CheckpointSide::kLoad:
      return "load";
    case CheckpointSide::kLoadUnverified:
      return "load unverified";
    case CheckpointSide::kPythonLoad:
      return "python load";
    case CheckpointSide::kCopy:
      return "copy";
    case CheckpointSide::kFirstAsync:
      return "first async";
    default:
      return "later async";
  }
}

size_t CheckpointReport::rounds() const {
  const auto* times = find(*this, CheckpointSide::kSave);
  return times ? times->size() : 0;
}

std::optional<double> CheckpointReport::ratio(CheckpointSide side, CheckpointSide base) const {
  const auto *above = find(*this, side), *below = find(*this, base);
  if (!above || !below) return std::nullopt;
  std::vector<double> ratios;
  for (size_t i = 0; i < above->size(); ++i) ratios.push_back(above->at(i) / below->at(i));
  return median(ratios);
}

bool has_sha_instructions(std::string_view cpuinfo) {
  std::istringstream lines{std::string(cpuinfo)};
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;)
      if (word == "sha_ni" || word == "sha2") return true;
  }
  return false;
}

std::string to_json_line(const CheckpointReport& report) {
  json object{{"op", kCheckpoint},
              {"bytes", report.parameter_bytes},
              {"state_bytes", report.state_bytes},
              {"tensors", report.tensors},
              {"threads", report.threads},
              {"rounds", report.rounds()},
              {"folder", report.folder},
              {"libtorch", report.libtorch},
              {"python_torch", report.python_torch.empty() ? json() : json(report.python_torch)},
              {"has_sha_instructions", report.has_sha_instructions},
              {"sha256_gbps", report.sha256_gbps},
              {"crc32_gbps", report.crc32_gbps}};
  for (CheckpointSide side : kCheckpointSides) {
    const auto prefix = prefix_of(side);
    const auto* measured = find(report, side);
    const auto times = measured ? step_times(*measured) : StepTimes();
    object[prefix + "_ms"] = measured ? json(times.median_ms) : json();
    object[prefix + "_p10_ms"] = measured ? json(times.p10_ms) : json();
    object[prefix + "_p90_ms"] = measured ? json(times.p90_ms) : json();
  }
  for (const auto& comparison : kCheckpointRatios)
    object[comparison.key] = or_null(report.ratio(comparison.side, comparison.base));
  object["wrong"] = report.is_checked ? json(report.wrong) : json();
  return object.dump();
}

std::string checkpoint_conditions(const CheckpointReport& report, const std::string& processor) {
  auto text =
      fmt::format("# {} of parameters with AdamW's state: {} in {} tensors; LibTorch {}\n",
                  tool::format_bytes(static_cast<uint64_t>(report.parameter_bytes)),
                  tool::format_bytes(static_cast<uint64_t>(report.state_bytes)), report.tensors, report.libtorch);
  text += fmt::format("# {} thread{} per side, {}\n", report.threads, report.threads == 1 ? "" : "s", processor);
  text +=
      fmt::format("# processor {} SHA instructions; one thread: OpenSSL's SHA-256 {:.2f} GB/s, CRC-32 {:.2f} GB/s\n",
                  report.has_sha_instructions ? "has" : "has no", report.sha256_gbps, report.crc32_gbps);
  text += fmt::format("# folder: {}\n", report.folder);
  return text;
}

std::string checkpoint_table(const CheckpointReport& report) {
  auto text = fmt::format(kCheckpointTimes, "#", "side", "time", "p10", "p90", "speed") +
              fmt::format(kCheckpointTimes, "#", "", "(ms)", "(ms)", "(ms)", "(GB/s)");
  for (CheckpointSide side : kCheckpointSides) {
    const auto* measured = find(report, side);
    if (!measured) continue;
    const auto times = step_times(*measured);
    text += fmt::format(kCheckpointTimes, " ", name_of(side), milliseconds(times.median_ms), milliseconds(times.p10_ms),
                        milliseconds(times.p90_ms),
                        fmt::format("{:.2f}", static_cast<double>(report.state_bytes) / times.median_ms / 1e6));
  }
  const char* verdict = !report.is_checked  ? "tensors not checked"
                        : report.wrong != 0 ? "SOME TENSORS ARE WRONG"
                                            : "all tensors are right";
  text += fmt::format("# {} rounds; {}\n#\n", report.rounds(), verdict);
  for (const auto& comparison : kCheckpointRatios)
    if (const auto ratio = report.ratio(comparison.side, comparison.base))
      text += fmt::format("  {:<28} {:>7}\n", comparison.name, multiple(*ratio));
  return text;
}

}  // namespace lockstep::bench
