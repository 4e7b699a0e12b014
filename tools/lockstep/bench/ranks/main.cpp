// lockstep-bench: one rank of `lockstep bench`, which starts it, so that lockstep itself does not load LibTorch.
//   lockstep-bench --backends   prints the backends of this build for CPU tensors as a JSON array
//   lockstep-bench PLAN         measures a collective; PLAN is a CollectivePlan as JSON
//   lockstep-bench --ddp PLAN   trains models; PLAN is a DdpPlan as JSON
//   lockstep-bench --gpus       prints the names of the GPUs that this build can use as a JSON array
//   lockstep-bench --gpu SIDE   trains on the first GPU as requested on stdin
//   lockstep-bench --checkpoint PLAN   saves and loads as requested on stdin; PLAN is a CheckpointPlan as JSON

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <lockstep/backend.h>
#include <lockstep/error.h>
#include <lockstep/fast_convolutions.h>
#include <lockstep/process_group.h>

#include "bench/ranks/checkpoint_state.h"
#include "bench/ranks/measure.h"
#ifdef LOCKSTEP_BENCH_GPU
#include "bench/ranks/gpu_trainer.h"
#endif

namespace lockstep::bench {
namespace {

std::vector<std::string> backends_for_the_cpu() {
  auto names = available_backends();
  std::erase(names, "nccl");
  return names;
}

#ifndef LOCKSTEP_BENCH_GPU
std::vector<std::string> usable_gpus() {
  return {};
}

void serve_trainer(const std::string&) {
  throw UsageError("this build cannot train on a GPU");
}
#endif

void run_plan(const RunPlan& plan, const std::string& backend, const auto& measure) {
  const auto world = init_process_group({.backend = backend, .device = c10::Device(c10::kCPU)});
  if (world.size() != plan.ranks)
    throw UsageError("there are " + std::to_string(world.size()) + " ranks, but the plan is for " +
                     std::to_string(plan.ranks));
  SharedPage page(plan.page, world.rank(), world.size(), plan.oversubscribed);
  std::ofstream results;
  if (world.rank() == 0) results.open(plan.results);
  measure(world, page, [&](const auto& message) {
    results << to_line(message) << std::endl;
    if (!results) throw SystemError("cannot write to " + plan.results);
  });
  page.barrier();  // keeps rank 0 alive until all ranks are done
}

void run(const std::string& option, const std::string& text) {
  if (option == "--backends") {
    std::cout << nlohmann::json(backends_for_the_cpu()).dump() << std::endl;
  } else if (option == "--ddp") {
    prefer_fast_convolutions();
    const auto plan = ddp_plan_from(text);
    run_plan(plan, plan.backend,
             [&](const auto& world, auto& page, const auto& report) { measure_ddp(plan, world, page, report); });
  } else if (option == "--gpus") {
    std::cout << nlohmann::json(usable_gpus()).dump() << std::endl;
  } else if (option == "--gpu") {
    serve_trainer(text);
  } else if (option == "--checkpoint") {
    serve_checkpoints(checkpoint_plan_from(text));
  } else if (option.starts_with('{')) {
    const auto plan = collective_plan_from(option);
    run_plan(plan, plan.backends.at(0),
             [&](const auto& world, auto& page, const auto& report) { measure_collective(plan, world, page, report); });
  } else {
    throw UsageError("this program is started by lockstep bench");
  }
}

}  // namespace
}  // namespace lockstep::bench

int main(int argc, char** argv) try {
  lockstep::bench::run(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
} catch (const std::exception& error) {
  std::cerr << "lockstep-bench: " << error.what() << '\n';
  return 1;
}
