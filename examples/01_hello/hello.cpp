// The first program: every rank contributes a number, and all ranks receive the sum and the mean.
//
//   lockstep run -n 2 ./hello
//
// Without the launcher, the ranks rendezvous through a file that must not exist yet, in a folder that only this user
// can write to.
//
//   (export WORLD_SIZE=2 LOCKSTEP_INIT_METHOD=file://$(mktemp -d)/hello
//    RANK=0 ./hello & RANK=1 ./hello; wait)

#include <iostream>

#include <lockstep/lockstep.h>

int main() {
  auto world = lockstep::init_process_group();  // from the environment; started alone, this is rank 0 of 1
  auto sum = torch::full({4}, world.rank() + 1.0);
  auto mean = sum.clone();
  world.all_reduce(sum);  // blocks until the sum is complete
  auto work = world.all_reduce_async(mean, lockstep::ReduceOp::kAvg);
  work.wait();  // until then, compute something else, but leave the tensor alone
  if (world.rank() == 0) std::cout << "sum" << sum << "\nmean" << mean << '\n';
}
