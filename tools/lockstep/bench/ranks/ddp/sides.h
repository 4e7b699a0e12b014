#pragma once

#include "bench/ranks/common_page.h"
#include "bench/ranks/ddp/training.h"
#include "bench/ranks/side.h"

namespace lockstep::bench {

/// So many steps in a sample, always from the same weights.
struct StepsOf {
  Training& training;
  Batch batch;
  int steps = 1;
};

/// All ranks train at the same time.
class TogetherSide final : public Side {
 public:
  /// Where ranks talk, their parameters should be equal after each sample.
  enum class Check { kNone, kEqualParameters };

  TogetherSide(StepsOf work, Check check, CommonPage& page) : work_(std::move(work)), check_(check), page_(page) {}

  void prepare(int64_t) override { work_.training.reset(); }
  void warm_up() override { work_.training.step(work_.batch); }
  void run() override;
  int64_t count_wrong() override;

 private:
  const StepsOf work_;
  const Check check_;
  CommonPage& page_;
};

/// Rank 0 trains, while the others sleep.
class AloneSide final : public Side {
 public:
  AloneSide(StepsOf work, CommonPage& page) : work_(std::move(work)), page_(page) {}

  void prepare(int64_t) override;
  void warm_up() override;
  void run() override;
  int64_t count_wrong() override { return 0; }

 private:
  const StepsOf work_;
  CommonPage& page_;
};

}  // namespace lockstep::bench
