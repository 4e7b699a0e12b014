// A rank of the test killed_peer: rank 1 is killed between two collectives, and rank 0 must be told by a PeerError.

#include <unistd.h>

#include <csignal>
#include <iostream>

#include <ATen/ATen.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

int main() {
  auto world = lockstep::init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
  try {
    for (int step = 0; step < 100000; ++step) {
      if (world.rank() == 1 && step == 20) ::kill(::getpid(), SIGKILL);
      world.all_reduce(at::ones({8}));
    }
  } catch (const lockstep::PeerError& error) {
    std::cout << "PeerError: " << error.what() << std::endl;
    return 0;
  }
  return 1;
}
