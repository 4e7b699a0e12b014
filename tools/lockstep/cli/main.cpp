#include <lockstep/launcher.h>

#include "cli/commands.h"

int main(int argc, char** argv) {
  if (auto code = lockstep::run_as_supervisor(argc, argv)) return *code;
  return run_command({argv + 1, argv + argc});
}
