#include "base/start_thread.h"

#include <system_error>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

std::thread start_thread(const char* purpose, std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw SystemError(text("cannot start a thread for ", purpose, ": ", error.code().message(),
                           ". Raise the limit of processes (ulimit -u, or the container's pids limit)"));
  }
}

}  // namespace lockstep
