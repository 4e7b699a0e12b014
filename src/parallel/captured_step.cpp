#include <lockstep/captured_step.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>
#include "comm/torch_version.h"

#include "base/text.h"
#include "comm/capture.h"
#include "parallel/optimizer_watch.h"

namespace lockstep::detail {
namespace {

std::vector<at::Tensor> on_device(const std::vector<at::Tensor>& inputs, c10::Device device) {
  std::vector<at::Tensor> result;
  for (const auto& input : inputs) result.push_back(input.to(device, /*non_blocking=*/true));
  return result;
}

}  // namespace

class StepCapture::Impl {
 public:
  Impl(ProcessGroup group, const CapturedStepOptions& options) : group_(std::move(group)), options_(options) {
    if (options.warm_up < 1)
      throw UsageError(text("CapturedStep: option warm_up is ", options.warm_up,
                            ", expected 1 or more; the first steps allocate state that later steps use"));
    if (group_.device().is_cuda()) stream_ = make_capture_stream(group_.device());
  }

  bool is_captured() const { return is_captured_; }

  bool call(const std::vector<at::Tensor>& given, const Run& run) {
    const auto inputs = on_device(given, group_.device());
    if (!stream_) {
      run(inputs);
      return false;
    }
    if (has_failed_) throw UsageError(text(me(), "an earlier capture of this step failed; create a new CapturedStep"));
    const bool is_as_before = is_alike(inputs, is_captured_ ? inputs_ : last_);
    if (!is_captured_ && is_as_before && warm_ups_ == options_.warm_up) capture(inputs, run);
    if (is_captured_ && is_as_before) {
      replay(inputs);
      return true;
    }
    if (!is_captured_) {
      last_ = inputs;
      if (warm_ups_ < options_.warm_up) ++warm_ups_;
    }
    stream_->run([&] { run(inputs); });
    return false;
  }

 private:
  std::string me() const { return text("rank ", group_.rank(), ": CapturedStep: "); }

  void capture(const std::vector<at::Tensor>& inputs, const Run& run) {
    if (is_autocast_enabled(group_.device().type()))
      throw UsageError(text(me(),
                            "the step was called inside of an autocast guard, so the graph would use weights that "
                            "were converted before the capture; construct the guard inside of the step"));
    stream_->run([&] {
      for (const auto& input : inputs) inputs_.push_back(input.detach().clone());
    });
    Recording recording;
    has_failed_ = true;
    try {
      stream_->capture([&] {
        const OptimizerWatch watch;
        run(inputs_);
        refuse(watch.found());
      });
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw UsageError(
          text(me(), "the step cannot be captured; it must not wait for the GPU (item(), cpu(), printing a tensor, a ",
               "loss kept from an earlier step) and must not use the default stream: ", error.what()));
    }
    before_replay_ = recording.take();
    last_.clear();
    has_failed_ = false;
    is_captured_ = true;
  }

  void refuse(const std::string& optimizer) const {
    if (!optimizer.empty())
      throw UsageError(text(me(), "the step calls ", optimizer,
                            "::step, which counts steps and keeps its learning rate on the host, so that every replay "
                            "would repeat the captured step; use lockstep::FusedAdamW, FusedAdam or FusedSGD"));
  }

  static bool is_alike(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& others) {
    return std::equal(inputs.begin(), inputs.end(), others.begin(), others.end(), [](const auto& a, const auto& b) {
      return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
    });
  }

  void replay(const std::vector<at::Tensor>& inputs) {
    const c10::NoGradGuard no_grad;
    try {
      for (const auto& prepare : before_replay_) prepare();
    } catch (const UsageError& error) {
      throw UsageError(text(me(), error.what()));
    }
    if (!inputs.empty()) copy_together(inputs_, inputs);
    run_captured(group_, [&] { stream_->replay(); }, {.site = options_.site});
  }

  const ProcessGroup group_;
  const CapturedStepOptions options_;
  std::vector<at::Tensor> inputs_;  // the buffers that the captured graph reads
  std::vector<std::function<void()>> before_replay_;
  std::unique_ptr<CaptureStream> stream_;  // null on a CPU
  std::vector<at::Tensor> last_;           // inputs of the last call, until a call is captured
  int warm_ups_ = 0;
  bool is_captured_ = false;
  bool has_failed_ = false;
};

StepCapture::StepCapture(ProcessGroup group, const CapturedStepOptions& options)
    : impl_(std::make_unique<Impl>(std::move(group), options)) {}

StepCapture::~StepCapture() = default;

bool StepCapture::call(const std::vector<at::Tensor>& inputs, const Run& run) {
  return impl_->call(inputs, run);
}

bool StepCapture::is_captured() const {
  return impl_->is_captured();
}

}  // namespace lockstep::detail
