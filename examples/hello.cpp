// The first program: every rank brings a number, and all of them get the sum and the mean.
//
//   RANK=0 WORLD_SIZE=2 LOCKSTEP_INIT_METHOD=file:///tmp/hello ./hello &
//   RANK=1 WORLD_SIZE=2 LOCKSTEP_INIT_METHOD=file:///tmp/hello ./hello

#include <iostream>

#include <lockstep/lockstep.h>

int main() {
  auto world = lockstep::init_process_group();  // from the environment; started alone, this is rank 0 of 1
  auto t = torch::full({4}, world.rank() + 1.0);
  world.all_reduce(t);  // the sum by default; returns when done
  auto work = world.all_reduce_async(t, lockstep::ReduceOp::kAvg);
  work.wait();
  if (world.rank() == 0) std::cout << t << '\n';
}
