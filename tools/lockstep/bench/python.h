#pragma once

#include <string>

namespace lockstep::bench {

struct Python {
  std::string program{};  // a path
  std::string torch{};    // the version of its torch
};

/// The first of python3 in PATH and /usr/bin/python3 that has torch with this library: Gloo, or NCCL and a GPU.
/// UsageError saying what each lacks when none has. Starts both, which takes seconds.
Python find_python(const std::string& library);

}  // namespace lockstep::bench
