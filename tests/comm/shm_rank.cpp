#include "comm/shm_rank.h"

#include <array>
#include <csignal>
#include <iostream>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "backends/shm/arena.h"

namespace {

using lockstep::ProcessGroup;

constexpr int64_t kElements = 48 << 20;  // so many that there is time to stop in the middle
constexpr float kBefore = 1, kReused = 42;

void say_line(const std::string& line) {
  std::cout << line + "\n" << std::flush;
}

void await_line() {
  std::string line;
  std::getline(std::cin, line);
}

/// Stops this process as soon as one of these elements has changed. Says whether the last element had not by then: the
/// call was under way. ThreadSanitizer must not see that it reads what the call writes.
__attribute__((no_sanitize("thread"))) void stop_when_changed(const float* data, std::array<int64_t, 3> elements) {
  const volatile float* watched = data;
  for (bool has_changed = false; !has_changed;)
    for (int64_t element : elements) has_changed = has_changed || watched[element] != kBefore;
  const bool is_under_way = watched[kElements - 1] == kBefore;
  say_line(is_under_way ? "stopping" : "too late");
  if (is_under_way) ::raise(SIGSTOP);
}

void stop_in_the_middle(const ProcessGroup& world, const std::function<void(const at::Tensor&)>& call) {
  const auto tensor = world.allocate({kElements}, at::kFloat).fill_(kBefore + static_cast<float>(world.rank() == 0));
  if (world.rank() == 1) tensor.fill_(kBefore);
  world.barrier();
  if (world.rank() == 1) {
    std::thread watcher(stop_when_changed, tensor.data_ptr<float>(), std::array<int64_t, 3>{0, 1 << 16, kElements / 2});
    try {
      call(tensor);
    } catch (const lockstep::PeerError&) {
      watcher.join();
      throw;
    }
    watcher.join();
    return say_line("returned with " + std::to_string(at::sum(tensor == kReused).item<int64_t>()) + " wrong elements");
  }
  std::thread giving_up([&] {
    await_line();
    world.abort("the test wants it");
  });
  try {
    call(tensor);
  } catch (const lockstep::PeerError&) {
    tensor.fill_(kReused);
    say_line("reused");
  }
  giving_up.join();
  await_line();
  const auto others = at::sum(tensor != kReused).item<int64_t>();
  say_line(others == 0 ? "intact" : "overwritten: " + std::to_string(others) + " elements");
}

}  // namespace

void stop_in_all_reduce(const ProcessGroup& world) {
  stop_in_the_middle(world, [&](const at::Tensor& tensor) { world.all_reduce(tensor); });
}

void stop_in_broadcast(const ProcessGroup& world) {
  stop_in_the_middle(world, [&](const at::Tensor& tensor) { world.broadcast(tensor, 0); });
}

void free_memory_after_a_kill(const std::function<ProcessGroup()>& join) {
  const auto arena = lockstep::shm::Arena::of_process();
  const auto first_room = [&] {  // for a large block, which finds none between two others
    char* block = arena->reserve(256 << 20);
    arena->free(block);
    return arena->offset_of(block).value();
  };
  const auto before = first_room();
  try {
    const auto world = join();
    const auto tensor = at::ones({100000});
    for (int message = 0; message < 3; ++message) world.rank() == 0 ? world.send(tensor, 1) : world.recv(tensor, 0);
    world.all_reduce(tensor);
    say_line("running");
    world.recv(tensor, 1 - world.rank());  // nobody sends
  } catch (const lockstep::PeerError&) {
  }
  const auto after = first_room();
  if (after != before) throw std::runtime_error(std::to_string(after - before) + " bytes of shared memory are in use");
}
