#pragma once

#include <string>
#include <vector>

#include "bench/coprocess.h"
#include "bench/ranks/ddp_training.h"
#include "bench/ranks/rounds.h"
#include "bench/ranks/shared_page.h"

namespace lockstep::bench {

/// The steps of a sample, always from the same weights.
struct TrainingSample {
  Training& training;
  Batch batch;
  int steps = 1;
};

/// All ranks train at the same time.
class TogetherSide final : public Side {
 public:
  /// If the ranks communicate, their parameters must be equal after each sample.
  enum class Check { kNone, kEqualParameters };

  TogetherSide(TrainingSample work, Check check, SharedPage& page)
      : work_(std::move(work)), check_(check), page_(page) {}

  void prepare(int64_t) override { work_.training.reset(); }
  void warm_up() override { work_.training.step(work_.batch); }
  void run() override;
  int64_t count_wrong() override;

 private:
  const TrainingSample work_;
  const Check check_;
  SharedPage& page_;
};

/// Rank 0 trains, while the other ranks sleep.
class AloneSide final : public Side {
 public:
  AloneSide(TrainingSample work, SharedPage& page) : work_(std::move(work)), page_(page) {}

  void prepare(int64_t) override;
  void warm_up() override;
  void run() override;
  int64_t count_wrong() override { return 0; }

 private:
  const TrainingSample work_;
  SharedPage& page_;
};

/// One rank of PyTorch's DistributedDataParallel: a process that runs python_rank.py.
class PythonRank {
 public:
  struct Options {
    std::string python{};  // the interpreter
    std::string store{};   // file of their FileStore
    int rank = 0;
    int ranks = 1;
    bool has_mkldnn = true;
    std::vector<int> cores{};  // for its main thread; empty: all
  };

  /// Blocks until all ranks are connected. Throws SystemError if the process cannot be started.
  explicit PythonRank(const Options& options);

  /// Collective: Python's ranks communicate. Both block until done. Throw PeerError if the process has ended.
  void load_model(const std::string& model, const std::string& optimizer) {
    process_.request("model " + model + " " + optimizer);
  }
  void train(int steps) { process_.request("train " + std::to_string(steps)); }

  /// Makes the process fail if its parameters differ from those of the other ranks.
  void check() { process_.request("check"); }

  /// Restores the initial weights. Not collective.
  void reset() { process_.request("reset"); }

 private:
  Coprocess process_;
};

/// Steps of a Python rank.
class PythonSide final : public Side {
 public:
  PythonSide(PythonRank& python, int steps) : python_(python), steps_(steps) {}

  void prepare(int64_t) override { python_.reset(); }
  void warm_up() override { python_.train(1); }
  void run() override { python_.train(steps_); }
  int64_t count_wrong() override {
    python_.check();
    return 0;
  }

 private:
  PythonRank& python_;
  const int steps_;
};

}  // namespace lockstep::bench
