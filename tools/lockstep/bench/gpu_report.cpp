#include "bench/gpu_report.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/operation.h"
#include "bench/report_format.h"

namespace lockstep::bench {
namespace {

using json = nlohmann::ordered_json;

constexpr double kRounding = 0.01;  // relative, of a loss after steps in bfloat16 or TF32 with different kernels
constexpr GpuSide kSides[] = {GpuSide::kPlain,
                              GpuSide::kDdp,
                              GpuSide::kCaptured,
                              GpuSide::kCompiled,
                              GpuSide::kCompiledCaptured,
                              GpuSide::kPythonPlain,
                              GpuSide::kPythonGraph,
                              GpuSide::kPythonDdp,
                              GpuSide::kPythonBest,
                              GpuSide::kPythonCompile,
                              GpuSide::kPythonReduceOverhead,
                              GpuSide::kPythonMaxAutotune};
constexpr const char* kGpuTimes = "{} {:<10} {:<22} {:>8} {:>8} {:>8} {:>9} {:>8}\n";
constexpr const char* kCompiledComparison = "{} {:<10} {:>14} {:>18} {:>18} {:>18} {:>14} {:>10}\n";
constexpr const char* kGpuComparison = "{} {:<10} {:>10} {:>12} {:>10} {:>13} {:>15} {:>14}\n";

bool is_wrong(const GpuSample& sample, const GpuSample& plain) {
  return !(std::abs(sample.loss - plain.loss) <= kRounding * std::abs(plain.loss));  // true also for NaN
}

std::string prefix_of(GpuSide side) {
  std::string prefix = name_of(side);
  for (char separator : {' ', '-'}) std::replace(prefix.begin(), prefix.end(), separator, '_');
  return prefix;
}

/// ddp's peak memory relative to the lower peak of python ddp and python best.
std::optional<double> memory_ratio(const GpuRow& row) {
  const auto *by_default = row.find(GpuSide::kPythonDdp), *best = row.find(GpuSide::kPythonBest);
  if (!by_default || !best) return std::nullopt;
  const auto least = std::min(by_default->peak_bytes, best->peak_bytes);
  return static_cast<double>(row.find(GpuSide::kDdp)->peak_bytes) / static_cast<double>(least);
}

/// The peak memory of compiled captured relative to Python's fastest compiled side.
std::optional<double> compiled_memory_ratio(const GpuRow& row) {
  const auto *captured = row.find(GpuSide::kCompiledCaptured), *best = row.best_compiled_in_python();
  if (!captured || !best) return std::nullopt;
  return static_cast<double>(captured->peak_bytes) / static_cast<double>(best->peak_bytes);
}

/// The time of compiled captured relative to Python's fastest compiled side.
std::optional<double> compiled_ratio(const GpuRow& row) {
  const auto* best = row.best_compiled_in_python();
  return best ? row.ratio(GpuSide::kCompiledCaptured, best->side) : std::nullopt;
}

std::string or_dash(const std::optional<double>& value) {
  return value ? multiple(*value) : "-";
}

}  // namespace

const char* name_of(GpuSide side) {
  switch (side) {
    case GpuSide::kPlain:
      return "plain";
    case GpuSide::kDdp:
      return "ddp";
    case GpuSide::kCaptured:
      return "captured";
    case GpuSide::kPythonPlain:
      return "python plain";
    case GpuSide::kPythonGraph:
      return "python graph";
    case GpuSide::kPythonDdp:
      return "python ddp";
    case GpuSide::kPythonBest:
      return "python best";
    case GpuSide::kCompiled:
      return "compiled";
    case GpuSide::kCompiledCaptured:
      return "compiled captured";
    case GpuSide::kPythonCompile:
      return "python compile";
    case GpuSide::kPythonReduceOverhead:
      return "python reduce-overhead";
    default:
      return "python max-autotune";
  }
}

const GpuSample* GpuRow::find(GpuSide side) const {
  const auto found =
      std::find_if(samples.begin(), samples.end(), [&](const GpuSample& sample) { return sample.side == side; });
  return found == samples.end() ? nullptr : &*found;
}

std::optional<double> GpuRow::ratio(GpuSide side, GpuSide base) const {
  const auto *above = find(side), *below = find(base);
  if (!above || !below) return std::nullopt;
  std::vector<double> ratios;
  for (size_t i = 0; i < above->times_us.size(); ++i) ratios.push_back(above->times_us[i] / below->times_us[i]);
  return median(ratios);
}

const GpuSample* GpuRow::best_compiled_in_python() const {
  const GpuSample* best = nullptr;
  for (const auto side : kPythonCompiledSides) {
    const auto* sample = find(side);
    if (sample && (!best || median(sample->times_us) < median(best->times_us))) best = sample;
  }
  return best;
}

int64_t GpuRow::wrong() const {
  return std::count_if(samples.begin(), samples.end(),
                       [&](const GpuSample& sample) { return is_wrong(sample, samples[0]); });
}

std::string to_json_line(const GpuRow& row) {
  json object{{"op", kGpu}, {"model", row.model}, {"gpu", row.gpu}, {"rounds", row.rounds()}, {"steps", row.steps}};
  for (GpuSide side : kSides) {
    const auto prefix = prefix_of(side);
    const auto* sample = row.find(side);
    const auto times = sample ? step_times(sample->times_us) : StepTimes();
    object[prefix + "_ms"] = sample ? json(times.median_ms) : json();
    object[prefix + "_p10_ms"] = sample ? json(times.p10_ms) : json();
    object[prefix + "_p90_ms"] = sample ? json(times.p90_ms) : json();
    object[prefix + "_peak_bytes"] = sample ? json(sample->peak_bytes) : json();
    object[prefix + "_loss"] = sample ? json(sample->loss) : json();
  }
  object["ratio_to_plain"] = or_null(row.ratio(GpuSide::kDdp, GpuSide::kPlain));
  object["ratio_to_python"] = or_null(row.ratio(GpuSide::kPythonDdp, GpuSide::kDdp));
  object["ratio_to_python_best"] = or_null(row.ratio(GpuSide::kPythonBest, GpuSide::kDdp));
  object["captured_ratio_to_python_graph"] = or_null(row.ratio(GpuSide::kCaptured, GpuSide::kPythonGraph));
  object["memory_to_python"] = or_null(memory_ratio(row));
  object["export_s"] = row.export_seconds > 0 ? json(row.export_seconds) : json();
  object["compiled_captured_ratio_to_python"] = or_null(compiled_ratio(row));
  object["compiled_captured_memory_to_python"] = or_null(compiled_memory_ratio(row));
  object["wrong"] = row.is_checked ? json(row.wrong()) : json();
  return object.dump();
}

std::string gpu_header() {
  return fmt::format(kGpuTimes, "#", "model", "side", "time", "p10", "p90", "peak", "loss") +
         fmt::format(kGpuTimes, "#", "", "", "(ms)", "(ms)", "(ms)", "(MiB)", "");
}

std::string gpu_lines(const GpuRow& row) {
  std::string lines;
  for (const auto& sample : row.samples) {
    const auto times = step_times(sample.times_us);
    lines += fmt::format(kGpuTimes, " ", row.model, name_of(sample.side), milliseconds(times.median_ms),
                         milliseconds(times.p10_ms), milliseconds(times.p90_ms),
                         fmt::format("{:.1f}", static_cast<double>(sample.peak_bytes) / (1 << 20)),
                         fmt::format("{:.4f}", sample.loss));
  }
  return lines;
}

std::string gpu_comparison(const std::vector<GpuRow>& rows) {
  std::string text = "#\n" + fmt::format(kGpuComparison, "#", "model", "ddp/plain", "python/ddp", "best/ddp",
                                         "plain/plain", "captured/graph", "peak/python's");
  for (const auto& row : rows)
    text += fmt::format(kGpuComparison, " ", row.model, or_dash(row.ratio(GpuSide::kDdp, GpuSide::kPlain)),
                        or_dash(row.ratio(GpuSide::kPythonDdp, GpuSide::kDdp)),
                        or_dash(row.ratio(GpuSide::kPythonBest, GpuSide::kDdp)),
                        or_dash(row.ratio(GpuSide::kPythonPlain, GpuSide::kPlain)),
                        or_dash(row.ratio(GpuSide::kCaptured, GpuSide::kPythonGraph)), or_dash(memory_ratio(row)));
  if (rows.empty() || !rows[0].best_compiled_in_python()) return text;
  text += "#\n" + fmt::format(kCompiledComparison, "#", "model", "compiled/ddp", "captured/default", "captured/reduce",
                              "captured/autotune", "captured/best", "peak/best");
  for (const auto& row : rows) {
    const auto captured_to = [&](GpuSide side) { return or_dash(row.ratio(GpuSide::kCompiledCaptured, side)); };
    text += fmt::format(kCompiledComparison, " ", row.model, or_dash(row.ratio(GpuSide::kCompiled, GpuSide::kDdp)),
                        captured_to(GpuSide::kPythonCompile), captured_to(GpuSide::kPythonReduceOverhead),
                        captured_to(GpuSide::kPythonMaxAutotune), or_dash(compiled_ratio(row)),
                        or_dash(compiled_memory_ratio(row)));
  }
  return text;
}

}  // namespace lockstep::bench
