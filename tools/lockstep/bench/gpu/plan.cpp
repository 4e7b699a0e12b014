#include "bench/gpu/plan.h"

#include <fmt/format.h>

#include <lockstep/error.h>

#include "bench/training_request.h"

namespace lockstep::bench {

std::vector<std::string> gpu_model_names() {
  return {"mlp-small", "cnn", "gpt-6x384", "gpt-124m"};
}

GpuPlan make_gpu_plan(const Request& request, const std::vector<std::string>& gpus) {
  refuse_message_options(request);
  if (!request.backend.empty() || !request.backends.empty())
    throw UsageError("gpu trains over nccl: leave out --backend and --backends");
  if (request.ranks.value_or(1) != 1)
    throw UsageError(
        fmt::format("-n is {}: gpu measures what DistributedDataParallel adds to a step of one rank on one "
                    "GPU, leave it out",
                    *request.ranks));
  const auto run = make_run_plan(request);
  GpuPlan plan{choose_models(request.models, gpu_model_names()), run.rounds, run.check};
  if (gpus.empty())
    throw UsageError(
        "gpu needs a GPU, and a build that has nccl for a LibTorch of 2.4 or later: nvidia-smi and the build's summary "
        "say what is missing");
  return plan;
}

}  // namespace lockstep::bench
