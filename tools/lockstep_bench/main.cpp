// lockstep-bench: one rank of `lockstep bench`, which starts it, so that lockstep itself need not load LibTorch.
//   lockstep-bench --backends   prints what this build has, as a JSON array
//   lockstep-bench PLAN         carries out a plan, one JSON object; rank 0 writes to the file that it names

#include <fstream>
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include <lockstep/backend.h>
#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "measure.h"

namespace {

void carry_out(const lockstep::bench::Plan& plan) {
  const auto world = lockstep::init_process_group({.backend = plan.backends.at(0)});
  if (world.size() != plan.ranks)
    throw lockstep::UsageError("there are " + std::to_string(world.size()) + " ranks, but the plan is for " +
                               std::to_string(plan.ranks));
  lockstep::bench::CommonPage page(plan.page, world.rank(), world.size(), plan.is_crowded);
  std::ofstream results;
  if (world.rank() == 0) results.open(plan.results);
  lockstep::bench::measure(plan, world, page, [&](const lockstep::bench::Message& message) {
    results << lockstep::bench::to_line(message) << std::endl;
    if (!results) throw lockstep::SystemError("cannot write to " + plan.results);
  });
  page.meet();  // rank 0 is needed to the end
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string argument = argc == 2 ? argv[1] : "";
  if (argument == "--backends")
    std::cout << nlohmann::json(lockstep::available_backends()).dump() << std::endl;
  else if (argument.starts_with('{'))
    carry_out(lockstep::bench::plan_from(argument));
  else
    throw lockstep::UsageError("this program belongs to lockstep bench, which starts it");
} catch (const std::exception& error) {
  std::cerr << "lockstep-bench: " << error.what() << '\n';
  return 1;
}
