#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/wait_notice.h"
#include "launch/cluster.h"
#include "launch/console.h"
#include "launch/live_files.h"
#include "launch/machine.h"
#include "launch/output.h"
#include "launch/worker_processes.h"

namespace lockstep {

/// One start of all workers of this node. Forwards their output, and stops all of them if one fails, if another node
/// orders it, or if this process receives a signal. Not thread-safe.
class Attempt {
 public:
  struct Options {
    const LaunchOptions& launch;
    const Plan& plan;
    const Layout& layout;
    std::string secret;       // the supervisor writes it to a file for the workers; or
    std::string secret_file;  // an existing file that has the secret
  };

  Attempt(const Options& options, Cluster* cluster, Signals* signals, Console* console, LiveFiles* live);

  /// Blocks until all workers and their descendants have ended on this node, and the cluster has decided what follows.
  Verdict run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Worker {
    int pid = 0;
    bool has_ended = false;
    Clock::time_point started;
    StderrMemory memory;
    std::unique_ptr<StreamOutput> out, err;  // null if the worker was not started
  };
  struct Ending {
    int status = 0;
    std::string description;
    bool was_stopped = false;
    bool out_of_memory = false;
  };

  void start_some();
  void start_next();
  int columns_after(const std::string& prefix) const;
  void skip_rest();
  std::string log_folder(int worker) const;
  bool has_ended() const { return outcome_.ends.size() == static_cast<size_t>(options_.plan.workers); }

  void watch();
  int time_left() const;
  void on_event(const WorkerProcesses::Event& event);
  void on_end(int worker, const Ending& ending);
  void on_signal(int number);
  void stop(int number);
  void stop_after_failure();
  void ask_to_end(int signal);
  bool is_due(const std::optional<Clock::time_point>& time) const;
  void kill_rest(const std::string& why);
  void mention_missing_ranks();
  void finish_output();
  void update_live_files();
  void print_status(const std::string& line);

  const Options options_;
  Cluster* const cluster_;
  Signals* const signals_;
  Console* const console_;
  LiveFiles* const live_;
  const Machine machine_;
  std::deque<Worker> workers_;  // workers started so far; skip_rest() adds the remaining workers
  std::unique_ptr<WorkerProcesses> processes_;
  std::optional<Clock::time_point> ask_at_;   // after a failure: when to send SIGTERM
  std::optional<Clock::time_point> kill_at_;  // after a signal: when to send SIGKILL
  std::optional<WaitNotice> silence_;         // set while no worker has printed anything and ranks are missing
  bool is_stopping_ = false;
  bool has_ended_worker_ = false;  // for the live files: a worker has ended
  int64_t memory_kills_ = 0;       // out-of-memory kills of this control group that are attributed to a worker
  Outcome outcome_;
};

}  // namespace lockstep
