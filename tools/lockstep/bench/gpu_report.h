#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// Those who train the same model, each in a process of its own.
enum class GpuSide { kPlain, kDdp, kCaptured, kPythonPlain, kPythonGraph, kPythonDdp, kPythonBest };

/// "python ddp", as it stands in the table; with _ in place of spaces it is a prefix of JSON's fields.
const char* name_of(GpuSide side);

/// What a side came to.
struct GpuSample {
  GpuSide side = GpuSide::kPlain;
  std::vector<double> times_us{};  // of a step, for each round
  int64_t peak_bytes = 0;          // the most that LibTorch's allocator had given out
  double loss = 0;                 // after the first steps, from the same weights and on the same batch
};

/// One model, and how its sides compare.
struct GpuRow {
  std::string model{};
  std::string gpu{};
  int steps = 1;  // in each sample
  bool is_checked = true;
  std::vector<GpuSample> samples{};  // plain first, then ddp and captured

  size_t rounds() const { return samples.at(0).times_us.size(); }
  const GpuSample* find(GpuSide side) const;
  /// How many times as long as `base` a side takes: the median over the rounds, in which they follow each other, so
  /// that what disturbs a machine for longer than a round disturbs both. None where either was not measured.
  std::optional<double> ratio(GpuSide side, GpuSide base) const;
  /// How many sides' losses are not plain's, by more than the rounding of other kernels explains.
  int64_t wrong() const;
};

/// One object without a line end.
std::string to_json_line(const GpuRow& row);

/// The times of each side of each model. What is no row begins with '#'.
std::string gpu_header();
std::string gpu_lines(const GpuRow& row);

/// How the sides of each model compare.
std::string gpu_comparison(const std::vector<GpuRow>& rows);

}  // namespace lockstep::bench
