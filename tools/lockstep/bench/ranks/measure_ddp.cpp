#include "bench/ranks/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include <ATen/Context.h>
#include <torch/version.h>

#include "bench/ranks/ddp_sides.h"
#include "bench/ranks/ddp_training.h"
#include "bench/ranks/pinning.h"
#include "bench/ranks/rounds.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;
using DdpReport = std::function<void(const DdpMessage&)>;

constexpr std::chrono::duration<double> kAllModels{60};  // time for all rounds of all models
constexpr std::chrono::duration<double> kSample{0.1};    // minimum duration of a sample

class DdpMeasurement {
 public:
  DdpMeasurement(const DdpPlan& plan, const ProcessGroup& world, SharedPage& page, const DdpReport& report)
      : plan_(plan), world_(world), page_(page), report_(report), rounds_(plan, page) {
    if (!plan.python.empty()) start_python();
    send(DdpSetup{world.backend_name(), TORCH_VERSION, at::globalContext().userEnabledMkldnn()});
  }

  void measure_model(const std::string& model) {
    send(DdpModelStarted{model});
    const auto local = make_local_training(model, plan_.optimizer);
    const auto ddp = make_ddp_training(model, plan_.optimizer, world_);
    const bool can_share = plan_.optimizer == "adamw" && world_.backend_name() == "shm";
    const auto shared = can_share ? make_shared_training(model, world_) : nullptr;
    const auto batch = make_batch(model, world_.rank());
    // Before pinning: the first steps start threads, which should not be pinned.
    int64_t wrong = shared ? count_different_parameters(*ddp, *shared, batch) : 0;
    wrong += count_wrong_gradients(*ddp, *local, model, world_.rank(), world_.size());
    if (python_) python_->load_model(model, plan_.optimizer);
    std::optional<Pinning> pinning;
    if (plan_.bind) pinning.emplace(world_.rank(), world_.size());

    const int steps = choose_steps(*local, batch);
    using Check = TogetherSide::Check;
    std::vector<MeasuredSide> sides;
    const auto add = [&](std::unique_ptr<Side> side) { sides.push_back({std::move(side), steps, {}, 0}); };
    add(std::make_unique<TogetherSide>(TrainingSample{*local, batch, steps}, Check::kNone, page_));
    add(std::make_unique<TogetherSide>(TrainingSample{*ddp, batch, steps}, Check::kEqualParameters, page_));
    add(std::make_unique<AloneSide>(TrainingSample{*local, batch, steps}, page_));
    if (shared)
      add(std::make_unique<TogetherSide>(TrainingSample{*shared, batch, steps}, Check::kEqualParameters, page_));
    if (python_) add(std::make_unique<PythonSide>(*python_, steps));
    sides[kDdpSide].wrong = wrong;
    rounds_.run(sides, kAllModels / static_cast<double>(plan_.models.size()));
    report_samples(model, sides, shared != nullptr);
  }

 private:
  enum { kLocalSide, kDdpSide, kAloneSide, kOtherSides };  // then those with shared parameters and Python, if any

  void start_python() {
    PythonRank::Options options;
    options.python = plan_.python;
    options.store = plan_.python_store;
    options.rank = world_.rank();
    options.ranks = world_.size();
    options.has_mkldnn = at::globalContext().userEnabledMkldnn();
    if (plan_.bind) options.cores = cores_of_rank(allowed_cores(), world_.rank(), world_.size());
    python_.emplace(options);
  }

  /// The number of steps that makes a sample long enough; the same on every rank.
  int choose_steps(Training& training, const Batch& batch) {
    constexpr int kTried = 3;
    page_.barrier();
    const auto begin = Clock::now();
    for (int step = 0; step < kTried; ++step) training.step(batch);
    const std::chrono::duration<double> took = Clock::now() - begin;
    return static_cast<int>(std::max(1.0, std::ceil(kTried * kSample.count() / page_.max(took.count()))));
  }

  void report_samples(const std::string& model, const std::vector<MeasuredSide>& sides, bool has_shared) {
    DdpSamples samples;
    samples.model = model;
    samples.steps = sides[kDdpSide].calls;
    samples.wrong = page_.sum(sides[kDdpSide].wrong);
    samples.local_us = sides[kLocalSide].times_us;
    samples.ddp_us = sides[kDdpSide].times_us;
    samples.alone_us = sides[kAloneSide].times_us;
    if (has_shared) samples.shared_us = sides[kOtherSides].times_us;
    if (python_) samples.python_us = sides.back().times_us;
    send(samples);
  }

  void send(const DdpMessage& message) {
    if (page_.rank() == 0) report_(message);
  }

  const DdpPlan& plan_;
  const ProcessGroup& world_;
  SharedPage& page_;
  const DdpReport& report_;
  Rounds rounds_;
  std::optional<PythonRank> python_;
};

}  // namespace

void measure_ddp(const DdpPlan& plan, const ProcessGroup& world, SharedPage& page, const DdpReport& report) {
  DdpMeasurement measurement(plan, world, page, report);
  for (const auto& model : plan.models) measurement.measure_model(model);
}

}  // namespace lockstep::bench
