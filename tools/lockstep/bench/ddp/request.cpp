#include "bench/ddp/request.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

#include "bench/training_request.h"

namespace lockstep::bench {
namespace {

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
  refuse_message_options(request);
  if (!request.backends.empty())
    throw UsageError(fmt::format("{} trains over one backend: give --backend in place of --backends", kDdp));
  DdpPlan plan{make_run_plan(request)};
  plan.models = choose_models(request.models, model_names());
  plan.backend = choose_backend(request.backend, available);
  return plan;
}

}  // namespace lockstep::bench
