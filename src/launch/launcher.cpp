#include <lockstep/launcher.h>

#include <limits.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include <algorithm>
#include <iomanip>

#include <lockstep/error.h>

#include "base/text.h"
#include "base/variables.h"
#include "launch/attempt.h"
#include "rendezvous/process_id.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kMaxDelay = std::chrono::minutes(1);

std::string absolute(const std::string& path) {
  char resolved[PATH_MAX];
  return ::realpath(path.c_str(), resolved) ? resolved : path;
}

class Launch {
 public:
  explicit Launch(const LaunchOptions& options)
      : options_(with_secret(options)), plan_(make_plan(options_, Machine(), process_variable)) {}

  LaunchExit run() {
    if (options_.dry_run) return show_plan();
    check_file_limit();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // adopts the descendants of a killed supervisor
    auto cluster = (plan_.node.nodes == 1 ? make_single_node : make_several_nodes)(options_, plan_, find_secret());
    live_.emplace(options_.command, plan_);
    const auto begin = Clock::now();
    for (int generation = 0;; ++generation) {
      auto verdict = attempt(*cluster, generation);
      if (verdict.restart && !pause(verdict, generation)) {
        verdict.restart = false;
        verdict.report.exit = LaunchExit::kPreempted;
      }
      if (verdict.restart) continue;
      verdict.report.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      verdict.report.command = options_.command;
      return conclude(verdict.report);
    }
  }

 private:
  static LaunchOptions with_secret(LaunchOptions options) {
    if (options.secret_file.empty()) options.secret_file = process_variable("LOCKSTEP_SECRET_FILE").value_or("");
    if (!options.secret_file.empty()) options.secret_file = absolute(options.secret_file);
    return options;
  }

  Secret find_secret() const {
    if (!options_.secret_file.empty()) return Secret::from_file(options_.secret_file);
    if (plan_.node.nodes == 1) return secret_;
    throw UsageError(
        "a job on several nodes needs a shared secret: create a file with (umask 077 && head -c 32 /dev/urandom > "
        "FILE), copy it to every node and pass --secret-file FILE; for a job on this node only, pass --standalone");
  }

  /// Without descriptors the store could not accept the ranks, which would wait until their time-out.
  void check_file_limit() const {
    constexpr rlim_t kOwn = 32, kPerWorker = 3;  // two pipes and a connection
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    const rlim_t needed = kOwn + kPerWorker * static_cast<rlim_t>(plan_.workers);
    if (files.rlim_max < needed)
      throw SystemError(text("the launcher needs ", needed, " open files for ", plan_.workers,
                             " workers, but the limit is ", files.rlim_max, ": raise it (ulimit -Hn)"));
  }

  LaunchExit show_plan() {
    Layout layout{plan_.node.rank * plan_.workers, plan_.node.nodes * plan_.workers, 0, plan_.node.store, plan_.job_id};
    console_.put(Console::Stream::kOut, describe_plan(options_, plan_, layout));
    console_.flush(signals_.fd());
    return LaunchExit::kSuccess;
  }

  Verdict attempt(Cluster& cluster, int generation) {
    auto layout = cluster.begin(generation, signals_, [this](const std::string& line) {
      print_status(line);
      console_.flush(signals_.fd());
    });
    if (!layout) {
      Verdict stopped;
      stopped.report.exit = LaunchExit::kPreempted;
      stopped.report.message = "stopped while waiting for other nodes";
      return stopped;
    }
    Attempt attempt(
        {options_, plan_, *layout, options_.secret_file.empty() ? secret_.bytes() : "", options_.secret_file}, &cluster,
        &signals_, &console_, &*live_);
    return attempt.run();
  }

  /// Prints the reason for the restart and waits for the restart delay. Returns false if a signal arrives.
  bool pause(const Verdict& verdict, int generation) {
    auto delay = options_.restart_delay;
    for (int i = 0; i < generation && delay < kMaxDelay; ++i) delay *= 2;
    delay = std::min<std::chrono::milliseconds>(delay, kMaxDelay);
    std::string why = verdict.report.message;
    if (const auto& culprit = verdict.report.culprit)
      why = text("rank ", culprit->rank, " (pid ", culprit->pid, " on ", culprit->host,
                 ") failed: ", culprit->description, culprit->uncaught.empty() ? "" : ", " + culprit->uncaught);
    print_status(text(why, "; restart ", generation + 1, " of ", options_.max_restarts, " in ",
                      std::chrono::duration<double>(delay).count(), " s"));
    console_.flush(signals_.fd());
    return !signals_.wait_for(delay);
  }

  LaunchExit conclude(const LaunchReport& report) {
    constexpr auto kErr = Console::Stream::kErr;
    live_->end(report_to_json(report));
    console_.put(kErr, options_.json ? report_to_json(report) : describe_report(report, console_.has_colour(kErr)));
    console_.flush(signals_.fd(), signals_.is_stop_requested());
    return report.exit;
  }

  void print_status(const std::string& line) {
    console_.put(Console::Stream::kErr, text("lockstep run: ", line, "\n"));
  }

  const LaunchOptions options_;
  const Plan plan_;
  const Secret secret_ = Secret::random();
  Signals signals_;
  Console console_;
  std::optional<LiveFiles> live_;
};

int refuse(LaunchExit code, const std::exception& error) {
  Console console;
  console.put(Console::Stream::kErr, text("lockstep run: ", error.what(), "\n"));
  console.flush(-1);
  return static_cast<int>(code);
}

}  // namespace

int launch(const LaunchOptions& options) {
  try {
    return static_cast<int>(Launch(options).run());
  } catch (const UsageError& error) {
    return refuse(LaunchExit::kUsage, error);
  } catch (const MismatchError& error) {  // nodes were started with different options
    return refuse(LaunchExit::kUsage, error);
  } catch (const TimeoutError& error) {
    return refuse(LaunchExit::kTimedOut, error);
  } catch (const PeerError& error) {
    return refuse(LaunchExit::kTimedOut, error);
  } catch (const std::exception& error) {
    return refuse(LaunchExit::kInternal, error);
  }
}

}  // namespace lockstep
