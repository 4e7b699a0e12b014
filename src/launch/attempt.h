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
#include "launch/crew.h"
#include "launch/machine.h"
#include "launch/output.h"

namespace lockstep {

/// One start of all workers of this node: passes on what they print, and stops all when one fails, when another node
/// says so or when this process is told to stop. One thread at a time.
class Attempt {
 public:
  struct Options {
    const LaunchOptions& launch;
    const Plan& plan;
    const Layout& layout;
    std::string secret;       // to be written to a file for the workers; or
    std::string secret_file;  // the file that has it
  };

  Attempt(const Options& options, Cluster* cluster, Signals* signals, Console* console);

  /// Returns when every worker has ended, with all its descendants, and the cluster knows.
  Verdict run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Worker {
    int pid = 0;
    bool has_ended = false;
    Clock::time_point started;
    StderrMemory memory;
    std::unique_ptr<StreamOutput> out, err;  // none when it was not started
  };
  struct Ending {
    int status = 0;
    std::string how;
    bool was_stopped = false;
  };

  void start_some();
  void start_next();
  void skip_rest();
  std::string log_folder(int worker) const;
  bool has_ended() const { return outcome_.ends.size() == static_cast<size_t>(options_.plan.workers); }

  void watch();
  int time_left() const;
  void on_event(const Crew::Event& event);
  void on_end(int worker, const Ending& ending);
  void on_signal(int number);
  void stop(int number);
  void stop_after_failure();
  void ask_to_end(int signal);
  bool is_due(const std::optional<Clock::time_point>& time) const;
  void kill_rest(const std::string& why);
  void mention_missing_ranks();
  void finish_output();
  void print_status(const std::string& line);

  const Options options_;
  Cluster* const cluster_;
  Signals* const signals_;
  Console* const console_;
  const Machine machine_;
  std::deque<Worker> workers_;  // that were started so far, and after skip_rest() the others
  std::unique_ptr<Crew> crew_;
  std::optional<Clock::time_point> ask_at_;   // when those who were told of a failure have had their time
  std::optional<Clock::time_point> kill_at_;  // when those who were asked to end have had theirs
  std::optional<WaitNotice> silence_;         // while no worker has printed anything and ranks are missing
  bool is_stopping_ = false;
  int64_t memory_kills_ = 0;  // of this control group, that are accounted for
  Outcome outcome_;
};

}  // namespace lockstep
