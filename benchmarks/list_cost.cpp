// What the calls on many tensors save, and what a receive from any rank costs: lockstep run -n 2 -- list_cost [backend]
//
// 100 tensors of 1000 floats are reduced one by one and by all_reduce_coalesced. Rank 1 sends one float to rank 0,
// which receives it by recv or by recv_any and answers. Both sides of a comparison in one run, alternating, medians.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>

namespace {

template <class Body>
double microseconds(int times, Body body) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) body();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / times;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Measures both bodies, alternating, and prints their medians on rank 0.
template <class First, class Second>
void compare(const lockstep::ProcessGroup& world, const char* first_name, First first, const char* second_name,
             Second second) {
  constexpr int kRounds = 11, kTimes = 50;
  microseconds(kTimes, first);
  microseconds(kTimes, second);
  std::vector<double> firsts, seconds;
  for (int round = 0; round < kRounds; ++round) {
    world.barrier();
    firsts.push_back(microseconds(kTimes, first));
    world.barrier();
    seconds.push_back(microseconds(kTimes, second));
  }
  if (world.rank() != 0) return;
  std::printf("%-9s %-34s %8.1f us\n", world.backend_name().c_str(), first_name, median(firsts));
  std::printf("%-9s %-34s %8.1f us, ratio %.2f\n", world.backend_name().c_str(), second_name, median(seconds),
              median(seconds) / median(firsts));
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const auto world = lockstep::init_process_group({.backend = argc > 1 ? argv[1] : "auto"});
  std::vector<torch::Tensor> tensors;
  for (int i = 0; i < 100; ++i) tensors.push_back(torch::zeros({1000}));
  compare(
      world, "100 all_reduce",
      [&] {
        for (const auto& tensor : tensors) world.all_reduce(tensor);
      },
      "all_reduce_coalesced", [&] { world.all_reduce_coalesced(tensors); });

  auto message = torch::zeros({1});
  const auto ping = [&](uint32_t tag, auto receive) {
    if (world.rank() == 0) {
      receive(tag);
      world.send(message, 1, tag);
    } else if (world.rank() == 1) {
      world.send(message, 0, tag);
      world.recv(message, 0, tag);
    }
  };
  compare(
      world, "recv and answer", [&] { ping(1, [&](uint32_t tag) { world.recv(message, 1, tag); }); },
      "recv_any and answer", [&] { ping(2, [&](uint32_t tag) { world.recv_any(message, tag); }); });
}
