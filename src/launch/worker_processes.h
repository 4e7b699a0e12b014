#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "launch/channel.h"
#include "rendezvous/net/secret.h"

namespace lockstep {

/// How one worker is started.
struct WorkerSpec {
  std::vector<std::string> command;
  std::vector<std::string> environment;  // the complete environment, "NAME=value"
  std::vector<int> cores;                // CPU affinity; empty: any
};

/// The workers of one attempt on this host, started through a supervisor process (supervisor.h). When this process ends
/// for any reason, the workers and their descendants are killed. Not thread-safe.
class WorkerProcesses {
 public:
  struct Event {
    enum class Kind { kStarted, kRefused, kEnded, kSupervisorGone } kind;
    int worker = 0;            // its index
    int value = 0;             // kStarted: pid; kRefused: errno; kEnded: status of waitpid
    bool was_stopped = false;  // kEnded: the worker was killed by a signal of signal_all()
    std::string why{};         // kSupervisorGone: the supervisor's error; empty if it was killed
  };

  /// Starts the supervisor by executing this program again; main() must begin with run_as_supervisor(). Unless `secret`
  /// is empty, the supervisor writes it to a file and sets LOCKSTEP_SECRET_FILE for the workers.
  explicit WorkerProcesses(const std::string& secret);
  /// Calls end_all().
  ~WorkerProcesses();
  WorkerProcesses(const WorkerProcesses&) = delete;
  WorkerProcesses& operator=(const WorkerProcesses&) = delete;

  /// Returns whether all messages to the supervisor are sent. Start the next worker only then: otherwise open files
  /// accumulate in this process, and a signal would queue behind all starts.
  bool is_ready() const { return !channel_.has_unsent(); }
  /// Starts a worker; the result arrives as kStarted or kRefused. Returns nonblocking pipes of its stdout and stderr.
  std::pair<FileDescriptor, FileDescriptor> start(int worker, const WorkerSpec& spec);

  /// Sends a signal to the process groups of all workers that have not ended. Resumes the supervisor if it is stopped.
  void signal_all(int number);

  /// Kills all workers and their descendants and blocks until none is left. If the supervisor does not finish within 15
  /// s, it is killed as well.
  void end_all();

  /// Poll fd() for events(). Readable: call read_events(). Writable: call flush().
  int fd() const { return channel_.fd(); }
  short events() const { return channel_.events(); }
  void flush() { channel_.flush(); }
  std::vector<Event> read_events();

  pid_t supervisor() const { return supervisor_; }
  /// The file in which a worker notes the folder of its training run; empty if there is none. Removed by end_all().
  std::string note_file() const { return folder_.empty() ? "" : SecretFolder::note_file(folder_); }

 private:
  void reap_supervisor();

  const rlimit files_before_;  // limit of open files before it was raised; workers inherit it
  Channel channel_;
  pid_t supervisor_ = -1;
  std::string folder_;  // the supervisor's folder with the secret and the note
  std::string why_;     // the supervisor's error
  bool is_over_ = false;
};

}  // namespace lockstep
