#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// A child process that prints one line when it is ready, and then answers each line on its stdin with one line on its
/// stdout. Between requests it blocks. Its stdin ends when this process ends. The destructor kills it.
class Coprocess {
 public:
  /// `name` appears in errors; command[0] is a path. Does not wait for the process. Throws SystemError if it cannot be
  /// started. `on_interrupt` is called when a signal interrupts waiting for an answer, and may throw.
  Coprocess(std::string name, std::vector<std::string> command, std::function<void()> on_interrupt = {});
  ~Coprocess();
  Coprocess(const Coprocess&) = delete;
  Coprocess& operator=(const Coprocess&) = delete;

  /// Both block and return one line of output, without its newline. Throw PeerError if the process has ended.
  std::string read_answer();
  std::string request(const std::string& line);

 private:
  const std::string name_;
  const std::function<void()> on_interrupt_;
  int socket_ = -1;  // connected to the child's stdin and stdout
  pid_t pid_ = -1;
};

}  // namespace lockstep::bench
