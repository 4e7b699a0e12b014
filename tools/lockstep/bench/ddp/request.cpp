#include "bench/ddp/request.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

namespace lockstep::bench {
namespace {

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Refuses what would have no effect.
void check_meaning(const Request& request) {
  const std::pair<const char*, bool> kForMessages[] = {
      {"--min", !request.least.empty()},    {"--max", !request.most.empty()},    {"--factor", request.factor != 0},
      {"--sizes", !request.sizes.empty()},  {"--dtype", !request.dtype.empty()}, {"--op", !request.redop.empty()},
      {"--memory", !request.memory.empty()}};
  std::vector<std::string> said;
  for (const auto& [option, is_said] : kForMessages)
    if (is_said) said.emplace_back(option);
  if (!said.empty())
    throw UsageError(
        fmt::format("{} trains models, it has no messages to choose: leave out {}", kDdp, fmt::join(said, ", ")));
  if (!request.backends.empty())
    throw UsageError(fmt::format("{} trains over one backend: give --backend in place of --backends", kDdp));
  if (!request.against.empty() && request.against != "python")
    throw UsageError(fmt::format("--against is \"{}\": it should be python, or left out", request.against));
}

std::vector<std::string> choose_models(const std::vector<std::string>& wanted) {
  const auto known = model_names();
  if (wanted.empty()) return known;
  std::vector<std::string> chosen;
  for (const auto& name : wanted) {
    if (!has(known, name))
      throw UsageError(
          fmt::format("--models: there is no '{}' to train; it should be among {}", name, fmt::join(known, ", ")));
    if (has(chosen, name)) throw UsageError(fmt::format("--models names '{}' twice: once is enough", name));
    chosen.push_back(name);
  }
  return chosen;
}

std::string choose_backend(const std::string& wanted, std::vector<std::string> available) {
  std::erase(available, "threads");  // its ranks are no processes
  available.insert(available.begin(), DdpPlan().backend);
  if (wanted.empty()) return available[0];
  if (!has(available, wanted))
    throw UsageError(fmt::format("--backend: there is no '{}' to train over; this build has {}", wanted,
                                 fmt::join(available, ", ")));
  return wanted;
}

}  // namespace

DdpPlan make_ddp_plan(const Request& request, const std::vector<std::string>& available) {
  check_meaning(request);
  DdpPlan plan{make_run_plan(request)};
  plan.models = choose_models(request.models);
  plan.backend = choose_backend(request.backend, available);
  return plan;
}

}  // namespace lockstep::bench
