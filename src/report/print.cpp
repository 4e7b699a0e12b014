#include <lockstep/print.h>

#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "base/live_line.h"

namespace lockstep::detail {

// Not through std::cout: its buffer may be written in several pieces, between which other processes write their lines.
void print_line(std::string line) {
  line += '\n';
  LiveLine::Pause pause(STDOUT_FILENO);
  std::cout.flush();
  std::fflush(stdout);
  write_fully(STDOUT_FILENO, line);
}

}  // namespace lockstep::detail
