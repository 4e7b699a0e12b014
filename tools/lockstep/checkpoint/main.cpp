// lockstep-checkpoint: the commands of `lockstep checkpoint`, which need LibTorch. lockstep replaces itself by this
// program and passes the command line that it has parsed.

#include "checkpoint/operations.h"

int main(int argc, char** argv) {
  return lockstep::checkpoint::run_checkpoint_program(argc, argv);
}
