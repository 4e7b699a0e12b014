// A program that spawns, for spawn_test.cpp: test_ranks spawning SCENARIO. Ranks print "rank R: ...", the parent how
// spawn ended.

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>

#include <ATen/ATen.h>

#include <lockstep/lockstep.h>

#include "ranks/test_ranks.h"

namespace {

using lockstep::ProcessGroup;
using std::chrono::milliseconds;

void say(const ProcessGroup& world, const std::string& line) {
  print_line("rank " + std::to_string(world.rank()) + ": " + line);
}

lockstep::SpawnOptions options() {
  return {.timeout = std::chrono::seconds(30), .grace = std::chrono::seconds(5)};
}

void sums() {
  at::parallel_for(0, 1000000, 1, [](int64_t, int64_t) {});  // threads that a fork would not survive
  at::randn({256, 256}).mm(at::randn({256, 256}));
  lockstep::spawn(
      3,
      [](ProcessGroup world) {
        auto tensor = at::full({1, 256}, world.rank() + 1.0).mm(at::ones({256, 1})).view({1});
        world.all_reduce(tensor);
        say(world, "sum " + std::to_string(tensor[0].item<float>()) + " pid " + std::to_string(::getpid()));
      },
      options());
}

void throws_usage() {
  lockstep::spawn(
      3,
      [](ProcessGroup world) {
        if (world.rank() == 1) world.broadcast(at::ones({1}), 7);
        world.barrier();
      },
      options());
}

void throws_foreign() {
  lockstep::spawn(
      3,
      [](ProcessGroup world) {
        if (world.rank() == 2) throw std::out_of_range("no such sample");
        world.barrier();
      },
      options());
}

void is_killed() {
  lockstep::spawn(
      3,
      [](ProcessGroup world) {
        world.barrier();
        if (world.rank() == 1) ::raise(SIGKILL);
        world.barrier();
      },
      options());
}

void exits() {
  lockstep::spawn(
      2,
      [](ProcessGroup world) {
        world.barrier();
        if (world.rank() == 1) std::exit(0);
        world.barrier();
      },
      options());
}

void takes_too_long() {
  auto limited = options();
  limited.join_timeout = milliseconds(8000);
  lockstep::spawn(
      2,
      [](ProcessGroup world) {
        world.barrier();
        say(world, "pid " + std::to_string(::getpid()));
        if (world.rank() == 1) ::pause();
      },
      limited);
}

void waits_for_ever() {
  lockstep::spawn(
      2,
      [](ProcessGroup world) {
        world.barrier();
        say(world, "pid " + std::to_string(::getpid()));
        ::pause();
      },
      options());
}

// Each call has its own ranks; what stands between them is run by the later ones too.
void twice() {
  lockstep::spawn(
      2, [](ProcessGroup world) { (world.barrier(), say(world, "first")); }, options());
  if (!lockstep::is_spawned()) print_line("between");
  lockstep::spawn(
      3, [](ProcessGroup world) { (world.barrier(), say(world, "second")); }, options());
}

void nested() {
  lockstep::spawn(
      1, [](ProcessGroup) { lockstep::spawn(1, [](ProcessGroup) {}); }, options());
}

const std::map<std::string, std::function<void()>> kSpawningScenarios{
    {"sums", sums},
    {"throws_usage", throws_usage},
    {"throws_foreign", throws_foreign},
    {"is_killed", is_killed},
    {"exits", exits},
    {"takes_too_long", takes_too_long},
    {"waits_for_ever", waits_for_ever},
    {"twice", twice},
    {"nested", nested},
};

}  // namespace

int run_spawning(const std::vector<std::string>& arguments) {
  try {
    kSpawningScenarios.at(arguments.at(0))();
    print_line("done");
    return 0;
  } catch (const lockstep::UsageError& error) {
    print_line(std::string("UsageError: ") + error.what());
  } catch (const lockstep::PeerError& error) {
    print_line(std::string("PeerError: ") + error.what());
  } catch (const lockstep::TimeoutError& error) {
    print_line(std::string("TimeoutError: ") + error.what());
  } catch (const lockstep::Error& error) {
    print_line(std::string("Error: ") + error.what());
  }
  return 3;
}
