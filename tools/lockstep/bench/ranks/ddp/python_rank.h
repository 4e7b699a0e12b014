#pragma once

#include <string>
#include <vector>

#include "bench/companion.h"
#include "bench/ranks/side.h"

namespace lockstep::bench {

/// One rank of PyTorch's own DistributedDataParallel: a process of its own that runs python_rank.py.
class PythonRank {
 public:
  struct Options {
    std::string python{};  // the interpreter
    std::string store{};   // a file by which the ranks meet
    int rank = 0;
    int ranks = 1;
    bool has_mkldnn = true;
    std::vector<int> cores{};  // for its main thread; empty: all
  };

  /// Returns when all ranks have met. SystemError when it cannot be started.
  explicit PythonRank(const Options& options);

  /// Collective: Python's ranks talk. Each returns when it is done. PeerError when the process has ended.
  void take_model(const std::string& model) { process_.ask("model " + model); }
  void train(int steps) { process_.ask("train " + std::to_string(steps)); }

  /// It ends when its parameters are not those of the other ranks.
  void check() { process_.ask("check"); }

  /// Back to the weights that the model began with. Not collective.
  void reset() { process_.ask("reset"); }

 private:
  Companion process_;
};

/// So many of its steps in a sample.
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
