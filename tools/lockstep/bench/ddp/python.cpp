#include "bench/ddp/python.h"

#include <chrono>
#include <sstream>
#include <vector>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "run_program.h"

namespace lockstep::bench {
namespace {

constexpr const char* kProbe = R"(
import sys, torch, torch.distributed
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    sys.exit("torch " + torch.__version__ + " has no Gloo")
print(sys.executable, torch.__version__, sep="\n")
)";

}  // namespace

Python find_python() {
  std::string lacking;
  for (const char* name : {"python3", "/usr/bin/python3"}) {
    const auto answer = tool::run_program({"/usr/bin/env", name, "-c", kProbe}, std::chrono::seconds(60));
    if (answer.failure.empty()) {
      Python python;
      std::istringstream lines(answer.output);
      std::getline(lines, python.program);
      std::getline(lines, python.torch);
      return python;
    }
    lacking += fmt::format("\n  {} {}", name, answer.failure);
  }
  throw UsageError(
      fmt::format("--against python needs a python3 that has torch: apt-get install python3-torch, or put one first in "
                  "PATH. These were tried:{}",
                  lacking));
}

}  // namespace lockstep::bench
