#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/value.h>

namespace lockstep {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  /// Number of steps in a row without infinities after which the scale grows.
  int64_t growth_interval = 2000;
  /// If false, scale() returns the loss, step() makes a step, and the other functions do nothing.
  bool enabled = true;
  /// Ranks that decide together whether a step is skipped. Not needed for gradients that DistributedDataParallel has
  /// averaged: an infinity of one rank is in the average of all. If set, step() and unscale_() are collective.
  std::optional<ProcessGroup> group{};
};

/// Scales the loss so that small gradients do not become zero in float16, as torch.amp.GradScaler does in Python. A
/// step whose gradients have infinities or NaNs is skipped on all ranks, and the scale is reduced.
///
///   lockstep::GradScaler scaler;
///   optimizer.zero_grad();
///   {
///     auto guard = lockstep::autocast(world.device(), torch::kHalf);
///     loss = F::cross_entropy(ddp(images), labels);
///   }
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);                        // only to clip or to look at gradients
///   lockstep::clip_grad_norm_(ddp.parameters(), 1.0);
///   scaler.step(optimizer);
///   scaler.update();
///
/// With lockstep's fused optimizers, and ZeroRedundancyOptimizer over them, nothing waits for the GPU, and all of this
/// can be inside a CapturedStep. Other optimizers wait for the GPU in step(). bfloat16 needs no scaler.
///
/// The order of calls is checked: UsageError for a second unscale_() or step() before update(), for update() without
/// step(), and for gradients in float16 (keep parameters in float32, use autocast). Not thread-safe.
class LOCKSTEP_EXPORT GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});

  /// Returns the loss, multiplied by the scale. The first call determines the device of the scale.
  at::Tensor scale(const at::Tensor& loss);
  /// Divides the gradients of the optimizer's parameters by the scale, in place.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Calls unscale_() unless that was done, and makes a step unless a gradient is infinite or NaN.
  void step(torch::optim::Optimizer& optimizer);
  /// Call it after step() of all optimizers. Reduces the scale if a step was skipped; otherwise the scale grows after
  /// growth_interval steps. `new_scale` sets it.
  void update(std::optional<double> new_scale = {});

  /// Returns the current scale. On a GPU it blocks.
  double get_scale() const;
  bool is_enabled() const { return options_.enabled; }

  /// In the layout of Python's GradScaler: "scale", "growth_factor", "backoff_factor", "growth_interval" and
  /// "_growth_tracker".
  Value state_dict() const;
  /// A step that was captured before continues with the loaded scale.
  void load_state_dict(const Value& value);

 private:
  enum class Stage { kReady, kUnscaled, kStepped };
  struct OptimizerStage {
    Stage stage = Stage::kReady;
    at::Tensor found_inf{};  // 1 if a gradient is infinite or NaN, else 0; on the device of the scale
  };

  void prepare(c10::Device device);

  GradScalerOptions options_;
  at::Tensor scale_;           // float32 with one element; undefined before the first scale()
  at::Tensor growth_tracker_;  // int32 with one element: steps since the scale changed
  double next_scale_;          // the scale before scale_ exists
  int64_t next_tracker_ = 0;
  std::unordered_map<const torch::optim::Optimizer*, OptimizerStage> stages_;  // since the last update()
};

}  // namespace lockstep
