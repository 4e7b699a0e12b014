#include "base/exit_status.h"

#include <string.h>
#include <sys/wait.h>

#include "base/text.h"

namespace lockstep {

std::string describe_exit_status(int status) {
  if (WIFEXITED(status)) return text("exit code ", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  const char* name = ::sigabbrev_np(signal);
  const char* description = ::sigdescr_np(signal);
  return text("killed by SIG", name ? name : std::to_string(signal), " (", description ? description : "a signal",
              WCOREDUMP(status) ? ", core dumped" : "", ")");
}

}  // namespace lockstep
