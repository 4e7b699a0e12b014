#pragma once

#include <string>

namespace lockstep {

/// A status from waitpid() as text: "exit code 3", "killed by SIGSEGV (Segmentation fault, core dumped)".
std::string describe_exit_status(int status);

}  // namespace lockstep
