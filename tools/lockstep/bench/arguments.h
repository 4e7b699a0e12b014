#pragma once

#include <string>

#include "bench/request.h"

namespace lockstep::bench {

/// All that stands on the command line of `lockstep bench`.
struct Arguments {
  Request request{};
  int threads = 1;
  bool no_bind = false;
  bool json = false;
  std::string plot_file{};
};

}  // namespace lockstep::bench
