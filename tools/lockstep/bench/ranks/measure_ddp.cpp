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

constexpr std::chrono::duration<double> kAllModels{60};  // so long may all rounds of all models take
constexpr std::chrono::duration<double> kSample{0.1};    // so long should a sample take, at least

class DdpMeasurement {
 public:
  DdpMeasurement(const DdpPlan& plan, const ProcessGroup& world, CommonPage& page, const DdpReport& report)
      : plan_(plan), world_(world), page_(page), report_(report), rounds_(plan, page) {
    if (!plan.python.empty()) start_python();
    say(DdpSetting{world.backend_name(), TORCH_VERSION, at::globalContext().userEnabledMkldnn()});
  }

  void measure_model(const std::string& model) {
    say(DdpProgress{model});
    const auto local = make_local_training(model);
    const auto ddp = make_ddp_training(model, world_);
    const auto batch = make_batch(model, world_.rank());
    // The first steps start threads, which should be free.
    const int64_t wrong = count_wrong_gradients(*ddp, *local, model, world_.rank(), world_.size());
    if (python_) python_->take_model(model);
    std::optional<Pinning> pinning;
    if (plan_.bind) pinning.emplace(world_.rank(), world_.size());

    const int steps = choose_steps(*local, batch);
    using Check = TogetherSide::Check;
    std::vector<Turn> turns;
    const auto add = [&](std::unique_ptr<Side> side) { turns.push_back({std::move(side), steps, {}, 0}); };
    add(std::make_unique<TogetherSide>(StepsOf{*local, batch, steps}, Check::kNone, page_));
    add(std::make_unique<TogetherSide>(StepsOf{*ddp, batch, steps}, Check::kEqualParameters, page_));
    add(std::make_unique<AloneSide>(StepsOf{*local, batch, steps}, page_));
    if (python_) add(std::make_unique<PythonSide>(*python_, steps));
    turns[kDdpTurn].wrong = wrong;
    rounds_.take(turns, kAllModels / static_cast<double>(plan_.models.size()));
    report_turns(model, turns);
  }

 private:
  enum { kLocalTurn, kDdpTurn, kAloneTurn, kPythonTurn };

  void start_python() {
    PythonRank::Options options;
    options.python = plan_.python;
    options.store = plan_.python_store;
    options.rank = world_.rank();
    options.ranks = world_.size();
    options.has_mkldnn = at::globalContext().userEnabledMkldnn();
    if (plan_.bind) options.cores = share_of(allowed_cores(), world_.rank(), world_.size());
    python_.emplace(options);
  }

  /// As many as make a sample long enough, the same on every rank.
  int choose_steps(Training& training, const Batch& batch) {
    constexpr int kTried = 3;
    page_.meet();
    const auto begin = Clock::now();
    for (int step = 0; step < kTried; ++step) training.step(batch);
    const std::chrono::duration<double> took = Clock::now() - begin;
    return static_cast<int>(std::max(1.0, std::ceil(kTried * kSample.count() / page_.largest(took.count()))));
  }

  void report_turns(const std::string& model, const std::vector<Turn>& turns) {
    DdpSamples samples;
    samples.model = model;
    samples.steps = turns[kDdpTurn].calls;
    samples.wrong = page_.sum(turns[kDdpTurn].wrong);
    samples.local_us = turns[kLocalTurn].times_us;
    samples.ddp_us = turns[kDdpTurn].times_us;
    samples.alone_us = turns[kAloneTurn].times_us;
    if (python_) samples.python_us = turns[kPythonTurn].times_us;
    say(samples);
  }

  void say(const DdpMessage& message) {
    if (page_.rank() == 0) report_(message);
  }

  const DdpPlan& plan_;
  const ProcessGroup& world_;
  CommonPage& page_;
  const DdpReport& report_;
  Rounds rounds_;
  std::optional<PythonRank> python_;
};

}  // namespace

void measure_ddp(const DdpPlan& plan, const ProcessGroup& world, CommonPage& page, const DdpReport& report) {
  DdpMeasurement measurement(plan, world, page, report);
  for (const auto& model : plan.models) measurement.measure_model(model);
}

}  // namespace lockstep::bench
