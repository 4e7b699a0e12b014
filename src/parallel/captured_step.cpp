#include <lockstep/captured_step.h>

#include <algorithm>
#include <deque>
#include <list>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/DimVector.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/capture.h"
#include "comm/torch_version.h"
#include "parallel/optimizer_watch.h"

// Overview.
//
// The first calls run the function on the stream for captures, as a normal step: optimizers allocate their state and
// the wrapper rebuilds its buckets. The first call with inputs of new sizes runs the same way. The next call with these
// sizes is captured: the function runs once more, on copies of the inputs, and the work that it launches becomes a CUDA
// graph. Later calls with these sizes replay the graph.
//
// A graph has fixed addresses. Its inputs are copied before each replay, and its result stays at one address. Objects
// that take part in the step and must copy values to the GPU before each replay, such as an optimizer its learning
// rate, register a function while the step is captured (Recording). A replay is one call of the group (run_captured):
// it is numbered, watched and fails like other calls.
//
// If more than max_graphs sizes are used, the least recently replayed graph is dropped. On a CPU every call runs the
// function.

namespace lockstep::detail {
namespace {

std::vector<at::Tensor> on_device(const std::vector<at::Tensor>& inputs, c10::Device device) {
  std::vector<at::Tensor> result;
  for (const auto& input : inputs) result.push_back(input.to(device, /*non_blocking=*/true));
  return result;
}

/// Sizes and types of the inputs of a call.
using InputSizes = std::vector<std::pair<at::DimVector, at::ScalarType>>;

InputSizes sizes_of(const std::vector<at::Tensor>& inputs) {
  InputSizes sizes;
  for (const auto& input : inputs) sizes.emplace_back(input.sizes(), input.scalar_type());
  return sizes;
}

}  // namespace

class StepCapture::Impl {
 public:
  Impl(ProcessGroup group, const CapturedStepOptions& options)
      : group_(std::move(group)), options_(options), most_(static_cast<size_t>(options.max_graphs)) {
    const auto check = [](const char* option, int value, const char* reason) {
      if (value < 1)
        throw UsageError(text("CapturedStep: option ", option, " is ", value, ", expected 1 or more; ", reason));
    };
    check("warm_up", options.warm_up, "the first steps allocate state that later steps use");
    check("max_graphs", options.max_graphs, "to run without graphs, call the function of the step itself");
    if (group_.device().is_cuda()) stream_ = make_capture_stream(group_.device());
  }

  size_t graphs() const { return graphs_.size(); }

  std::any* call(const std::vector<at::Tensor>& given, const Run& run) {
    const auto inputs = on_device(given, group_.device());
    if (!stream_) {
      run(inputs);
      return nullptr;
    }
    if (has_failed_) throw UsageError(text(me(), "an earlier capture of this step failed; create a new CapturedStep"));
    const auto sizes = sizes_of(inputs);
    auto* graph = find(sizes);
    if (!graph && were_seen(sizes) && warm_ups_ == options_.warm_up) graph = &capture(sizes, inputs, run);
    if (graph) {
      replay(*graph, inputs);
      return &graph->result;
    }
    remember(sizes);
    if (warm_ups_ < options_.warm_up) ++warm_ups_;
    stream_->run([&] { run(inputs); });
    return nullptr;
  }

 private:
  /// The step as a graph, for inputs of certain sizes.
  struct Graph {
    InputSizes sizes;
    std::vector<at::Tensor> inputs{};  // the graph reads them
    std::any result{};                 // the graph writes it
    std::vector<std::function<void()>> before_replay{};
    std::unique_ptr<CapturedGraph> graph{};  // last: destroyed first
  };

  std::string me() const { return text("rank ", group_.rank(), ": CapturedStep: "); }

  /// Returns null if there is no graph for these sizes. Otherwise makes the graph the most recent one.
  Graph* find(const InputSizes& sizes) {
    const auto found =
        std::find_if(graphs_.begin(), graphs_.end(), [&](const Graph& graph) { return graph.sizes == sizes; });
    if (found == graphs_.end()) return nullptr;
    graphs_.splice(graphs_.begin(), graphs_, found);
    return &graphs_.front();
  }

  bool were_seen(const InputSizes& sizes) const { return std::find(seen_.begin(), seen_.end(), sizes) != seen_.end(); }

  void remember(const InputSizes& sizes) {
    forget(sizes);
    seen_.push_front(sizes);
    if (seen_.size() > most_) seen_.pop_back();
  }

  void forget(const InputSizes& sizes) { seen_.erase(std::remove(seen_.begin(), seen_.end(), sizes), seen_.end()); }

  Graph& capture(const InputSizes& sizes, const std::vector<at::Tensor>& inputs, const Run& run) {
    if (is_autocast_enabled(group_.device().type()))
      throw UsageError(text(me(),
                            "the step was called inside of an autocast guard, so the graph would use weights that "
                            "were converted before the capture; construct the guard inside of the step"));
    if (graphs_.size() == most_) drop_oldest();
    Graph captured{sizes};
    stream_->run([&] {
      for (const auto& input : inputs) captured.inputs.push_back(input.detach().clone());
    });
    Recording recording;
    has_failed_ = true;
    try {
      captured.graph = stream_->capture([&] {
        const OptimizerWatch watch;
        run(captured.inputs);
        refuse(watch.found());
      });
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw UsageError(
          text(me(), "the step cannot be captured; it must not wait for the GPU (item(), cpu(), printing a tensor, a ",
               "loss kept from an earlier step) and must not use the default stream: ", error.what()));
    }
    captured.before_replay = recording.take();
    forget(sizes);
    has_failed_ = false;
    return graphs_.emplace_front(std::move(captured));
  }

  void drop_oldest() {
    group_.synchronize();  // its replays are done
    graphs_.pop_back();
    if (++dropped_ != most_) return;
    log_warning(text(me(), "inputs of more than ", most_,
                     " different sizes take turns, so that graphs are captured again and again, which takes longer "
                     "than a normal step; pad the inputs to fewer sizes, or increase max_graphs"));
  }

  void refuse(const std::string& optimizer) const {
    if (!optimizer.empty())
      throw UsageError(text(me(), "the step calls ", optimizer,
                            "::step, which counts steps and keeps its learning rate on the host, so that every replay "
                            "would repeat the captured step; use lockstep::FusedAdamW, FusedAdam or FusedSGD"));
  }

  void replay(const Graph& graph, const std::vector<at::Tensor>& inputs) {
    const c10::NoGradGuard no_grad;
    try {
      for (const auto& prepare : graph.before_replay) prepare();
    } catch (const UsageError& error) {
      throw UsageError(text(me(), without_rank(error.what(), group_.rank())));
    }
    if (!inputs.empty()) copy_together(graph.inputs, inputs);
    run_captured(group_, [&] { graph.graph->replay(); }, {.site = options_.site});
  }

  const ProcessGroup group_;
  const CapturedStepOptions options_;
  const size_t most_;                      // graphs
  std::unique_ptr<CaptureStream> stream_;  // null on a CPU
  std::list<Graph> graphs_{};              // the most recently replayed first
  std::deque<InputSizes> seen_{};          // of calls that were not captured, at most most_, the most recent first
  int warm_ups_ = 0;
  size_t dropped_ = 0;  // graphs
  bool has_failed_ = false;
};

StepCapture::StepCapture(ProcessGroup group, const CapturedStepOptions& options)
    : impl_(std::make_unique<Impl>(std::move(group), options)) {}

StepCapture::~StepCapture() = default;

std::any* StepCapture::call(const std::vector<at::Tensor>& inputs, const Run& run) {
  return impl_->call(inputs, run);
}

size_t StepCapture::graphs() const {
  return impl_->graphs();
}

}  // namespace lockstep::detail
