#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "launch/channel.h"

namespace lockstep {

/// How one worker is started.
struct WorkerSpec {
  std::vector<std::string> command;
  std::vector<std::string> environment;  // all of it, "NAME=value"
  std::vector<int> cores;                // to run on; empty: any
};

/// The workers of one attempt on this host, by way of a warden of their own (warden.h). Whatever happens to this
/// process, they and their descendants end with it. One thread at a time.
class Crew {
 public:
  struct Event {
    enum class Kind { kStarted, kRefused, kEnded, kWardenGone } kind;
    int worker = 0;            // its index
    int value = 0;             // its pid; the errno; the status as waitpid has it
    bool was_stopped = false;  // it ended by a signal of signal_all
  };

  /// Starts the warden: this very program again, whose main() must begin with run_as_warden. The secret is written to a
  /// file for the workers, which find its name in LOCKSTEP_SECRET_FILE, unless it is empty.
  explicit Crew(const std::string& secret);
  /// Ends all, by SIGKILL.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  /// Whether the warden has taken all that it was told. Start the next worker only then, so that files do not pile up
  /// here and a signal does not wait behind a thousand starts.
  bool is_ready() const { return !channel_.has_unsent(); }
  /// Starts a worker; kStarted or kRefused will tell. The ends to read its stdout and stderr from, nonblocking.
  std::pair<FileDescriptor, FileDescriptor> start(int worker, const WorkerSpec& spec);

  /// To the process groups of all workers that have not ended. A warden that is stopped goes on.
  void signal_all(int number);

  /// Kills all that descends from the workers and returns when nothing is left. A warden that does not do that in time
  /// is killed itself.
  void end_all();

  /// To be polled for events(). Readable: read_events has something. Writable: flush() can send more to the warden.
  int fd() const { return channel_.fd(); }
  short events() const { return channel_.events(); }
  void flush() { channel_.flush(); }
  std::vector<Event> read_events();

  pid_t warden() const { return warden_; }

 private:
  void reap_warden();

  const rlimit files_before_;  // this process's limit of open files, which workers have
  Channel channel_;
  pid_t warden_ = -1;
  std::string folder_;  // where the warden keeps the secret
  bool is_over_ = false;
};

}  // namespace lockstep
