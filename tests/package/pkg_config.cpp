// Built with the flags of pkg-config.
#include <lockstep/error.h>
#include <lockstep/print.h>
#include <lockstep/process_group.h>

int main() {
  auto world = lockstep::init_process_group();
  bool caught = false;
  try {
    world.new_group({-1});
  } catch (const lockstep::UsageError&) {  // classes of errors are the same inside and outside of the library
    caught = true;
  }
  lockstep::print(world, world.size(), " ranks, ", world.all_reduce(1.0), caught ? ", caught" : ", not caught");
}
