#include "bench/python.h"

#include <chrono>
#include <sstream>
#include <vector>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "run/run_program.h"

namespace lockstep::bench {
namespace {

constexpr const char* kProbe = R"(
import sys, torch, torch.distributed as dist
lacks = None
if not dist.is_available():
    lacks = "torch.distributed"
elif sys.argv[1] == "Gloo" and not dist.is_gloo_available():
    lacks = "Gloo"
elif sys.argv[1] == "NCCL" and not (dist.is_nccl_available() and torch.cuda.is_available()):
    lacks = "NCCL, or sees no GPU"
if lacks:
    sys.exit(f"torch {torch.__version__} has no {lacks}")
print(sys.executable, torch.__version__, sep="\n")
)";

}  // namespace

Python find_python(const std::string& library) {
  std::string lacking;
  for (const char* name : {"python3", "/usr/bin/python3"}) {
    const auto answer = tool::run_program({"/usr/bin/env", name, "-c", kProbe, library}, std::chrono::seconds(60));
    if (answer.failure.empty()) {
      Python python;
      std::istringstream lines(answer.output);
      std::getline(lines, python.program);
      std::getline(lines, python.torch);
      return python;
    }
    lacking += fmt::format("\n  {} {}", name, answer.failure);
  }
  throw UsageError(fmt::format(
      "--against python needs a python3 that has torch with {}: {}. These were tried:{}", library,
      library == "Gloo" ? "apt-get install python3-torch, or put one first in PATH" : "put one first in PATH",
      lacking));
}

}  // namespace lockstep::bench
