#include "compiled/compatibility.h"

#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include <torch/version.h>

#include "base/text.h"
#include "comm/setup/choose_device.h"

namespace lockstep::detail {
namespace {

/// "2.11" of "2.11.0".
std::string release_of(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

/// The extensions of this processor's instruction set, as /proc/cpuinfo names them.
std::vector<std::string> read_instructions() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::vector<std::string> names;
    for (std::string name; words >> name;) names.push_back(name);
    return names;
  }
  return {};
}

std::vector<std::string> missing_instructions(const CompiledDescription& model, const Machine& machine) {
  std::vector<std::string> missing;
  for (const auto& name : model.instructions)
    if (std::find(machine.instructions.begin(), machine.instructions.end(), name) == machine.instructions.end())
      missing.push_back(name);
  return missing;
}

}  // namespace

Machine this_machine(std::optional<c10::Device> gpu) {
  utsname system{};
  ::uname(&system);
  Machine machine{.torch = TORCH_VERSION, .architecture = system.machine, .instructions = read_instructions()};
  machine.gpus = usable_gpus();
  if (gpu && gpu->index() < machine.gpus) machine.compute_capability = compute_capability(*gpu);
  return machine;
}

std::string find_incompatibility(const CompiledDescription& model, const Machine& machine) {
  const auto release = release_of(model.torch);
  if (release != release_of(machine.torch))
    return text("it was compiled with PyTorch ", model.torch, ", but this program uses LibTorch ", machine.torch,
                "; compile it with PyTorch ", release_of(machine.torch));
  if (model.architecture != machine.architecture)
    return text("it was compiled for ", model.architecture, ", but this machine is ", machine.architecture,
                "; compile it on such a machine");
  if (const auto missing = missing_instructions(model, machine); !missing.empty())
    return text("it uses instructions that this processor lacks (", enumerate(missing),
                "); compile it on this machine, or on the oldest one that will run it");
  if (model.device == c10::kCPU) return "";
  if (machine.gpus == 0) return "it was compiled for GPUs, but this process can use none; lockstep doctor says why";
  if (model.compute_capability != machine.compute_capability)
    return text("it was compiled for GPUs of compute capability ", model.compute_capability, ", but this GPU has ",
                machine.compute_capability, "; compile it on such a GPU");
  return "";
}

}  // namespace lockstep::detail
