#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace lockstep::bench {

/// A process that answers each line on its stdin by one on its stdout, the first one unasked, when it is ready. It is
/// blocked while nobody asks it for anything, sees the end of its stdin when this process ends, and does not outlive
/// the object.
class Coprocess {
 public:
  /// `who` is for errors; command[0] is a path. Returns at once. SystemError when it cannot be started.
  Coprocess(std::string name, std::vector<std::string> command);
  ~Coprocess();
  Coprocess(const Coprocess&) = delete;
  Coprocess& operator=(const Coprocess&) = delete;

  /// Both return an answer, without its line end. PeerError when the process has ended.
  std::string read_answer();
  std::string request(const std::string& line);

 private:
  const std::string name_;
  int socket_ = -1;  // a socket: its stdin and stdout
  pid_t pid_ = -1;
};

}  // namespace lockstep::bench
