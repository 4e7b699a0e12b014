#include <lockstep/print.h>

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <iostream>

namespace lockstep::detail {

// Not through std::cout: its buffer may be written in several pieces, between which other processes write theirs.
void print_line(std::string line) {
  line += '\n';
  std::cout.flush();
  std::fflush(stdout);
  for (size_t written = 0; written < line.size();) {
    const auto count = ::write(STDOUT_FILENO, line.data() + written, line.size() - written);
    if (count > 0) {
      written += static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      pollfd output{STDOUT_FILENO, POLLOUT, 0};
      ::poll(&output, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace lockstep::detail
