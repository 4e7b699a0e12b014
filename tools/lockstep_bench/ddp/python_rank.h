#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "side.h"

namespace lockstep::bench {

/// One rank of PyTorch's own DistributedDataParallel: a process of its own that runs python_rank.py, and is blocked
/// while nobody asks it for anything. It does not outlive the object.
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

  /// Returns when all ranks have met. SystemError when that fails.
  explicit PythonRank(const Options& options);
  ~PythonRank();
  PythonRank(const PythonRank&) = delete;
  PythonRank& operator=(const PythonRank&) = delete;

  /// Collective: Python's ranks talk. Each returns when it is done. SystemError when the process has ended.
  void take_model(const std::string& model) { ask("model " + model); }
  void train(int steps) { ask("train " + std::to_string(steps)); }

  /// It ends when its parameters are not those of the other ranks.
  void check() { ask("check"); }

  /// Back to the weights that the model began with. Not collective.
  void reset() { ask("reset"); }

 private:
  struct Child {
    pid_t pid;
    int line;  // a socket: its stdin and stdout
  };
  PythonRank(int rank, Child child) : rank_(rank), child_(child) {}
  static Child start(const Options& options);
  void ask(const std::string& request);
  void await_answer();

  const int rank_;
  const Child child_;
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
