#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace lockstep::bench {

/// A process that answers each line on its stdin by one on its stdout, the first one unasked, when it is ready. It is
/// blocked while nobody asks it for anything, sees the end of its stdin when this process ends, and does not outlive
/// the object.
class Companion {
 public:
  /// `who` is for errors; command[0] is a path. Returns at once. SystemError when it cannot be started.
  Companion(std::string who, std::vector<std::string> command);
  ~Companion();
  Companion(const Companion&) = delete;
  Companion& operator=(const Companion&) = delete;

  /// Both return an answer, without its line end. PeerError when the process has ended.
  std::string await_answer();
  std::string ask(const std::string& request);

 private:
  const std::string who_;
  int line_ = -1;  // a socket: its stdin and stdout
  pid_t pid_ = -1;
};

}  // namespace lockstep::bench
