#include <lockstep/launcher.h>

#include "command_line.h"

int main(int argc, char** argv) {
  if (auto code = lockstep::run_as_warden(argc, argv)) return *code;
  return CommandLine().run({argv + 1, argv + argc});
}
