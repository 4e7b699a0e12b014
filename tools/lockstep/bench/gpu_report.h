#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// The variants that are compared. Each trains the same model in its own process.
enum class GpuSide {
  kPlain,
  kDdp,
  kCaptured,
  kCompiled,
  kCompiledCaptured,
  kPythonPlain,
  kPythonGraph,
  kPythonDdp,
  kPythonBest,
  kPythonCompile,
  kPythonReduceOverhead,
  kPythonMaxAutotune
};

/// The name in the table, such as "python ddp"; with '_' for spaces it is the prefix of JSON keys.
const char* name_of(GpuSide side);

/// The measurements of one side.
struct GpuSample {
  GpuSide side = GpuSide::kPlain;
  std::vector<double> times_us{};  // of one step, one entry per round
  int64_t peak_bytes = 0;          // peak of LibTorch's allocator
  double loss = 0;                 // after the first steps; all sides start with the same weights and batch
};

/// The measurements of one model.
struct GpuRow {
  std::string model{};
  std::string gpu{};
  int steps = 1;  // in each sample
  bool is_checked = true;
  std::vector<GpuSample> samples{};  // plain first, then ddp and captured
  double export_seconds = 0;         // that lockstep compile took; 0: compiled models were not measured

  size_t rounds() const { return samples.at(0).times_us.size(); }
  const GpuSample* find(GpuSide side) const;
  /// The time of `side` relative to `base`: the median of the ratios of all rounds. Within a round the sides run
  /// directly after each other, so that a longer disturbance affects both. None if either was not measured.
  std::optional<double> ratio(GpuSide side, GpuSide base) const;
  /// The fastest of Python's compiled sides, by its median; null if they were not measured.
  const GpuSample* best_compiled_in_python() const;
  /// The number of sides whose loss differs from that of plain by more than rounding explains.
  int64_t wrong() const;
};

/// The compiled sides of Python.
inline constexpr GpuSide kPythonCompiledSides[] = {GpuSide::kPythonCompile, GpuSide::kPythonReduceOverhead,
                                                   GpuSide::kPythonMaxAutotune};

/// One JSON object, without a newline.
std::string to_json_line(const GpuRow& row);

/// The table of step times, one line per side of a model. Lines that are not rows start with '#'.
std::string gpu_header();
std::string gpu_lines(const GpuRow& row);

/// The table that compares the sides of each model, and that of the compiled sides if they were measured.
std::string gpu_comparison(const std::vector<GpuRow>& rows);

}  // namespace lockstep::bench
