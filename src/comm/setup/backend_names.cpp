#include "comm/setup/backend_names.h"

#include <sstream>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/setup/backend_registry.h"

namespace lockstep::detail {
namespace {

constexpr const char* kAuto = "auto";
constexpr const char* kNccl = "nccl";  // the only one for CUDA tensors

std::string checked_name(const std::string& name) {
  if (name != kAuto) find_backend(name);
  return name;
}

}  // namespace

BackendNames parse_backends(const std::string& asked) {
  if (asked == kAuto) return {kAuto, kAuto};
  if (asked.find(':') == std::string::npos)
    return asked == kNccl ? BackendNames{.cuda = checked_name(asked)} : BackendNames{.cpu = checked_name(asked)};
  BackendNames names;
  std::istringstream parts(asked);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto colon = part.find(':');
    const auto device = part.substr(0, colon);
    auto* name = device == "cpu" ? &names.cpu : device == "cuda" ? &names.cuda : nullptr;
    if (!name || !name->empty() || colon == std::string::npos)
      throw UsageError(text("backend is '", asked, "'; for each device it is like \"cpu:gloo,cuda:nccl\""));
    *name = checked_name(part.substr(colon + 1));
  }
  if (names.cpu == kNccl) throw UsageError(text("backend is '", asked, "', but nccl moves CUDA tensors only"));
  if (!names.cuda.empty() && names.cuda != kAuto && names.cuda != kNccl)
    throw UsageError(text("backend is '", asked, "', but ", names.cuda, " moves CPU tensors; for cuda use nccl"));
  return names;
}

}  // namespace lockstep::detail
