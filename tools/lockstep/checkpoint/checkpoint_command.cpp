#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "checkpoint/arguments.h"
#include "cli/commands.h"
#include "run/child_process.h"

namespace lockstep::checkpoint {
namespace {

constexpr const char* kProgram = "lockstep-checkpoint";

constexpr const char* kFooter = R"(
lockstep checkpoint COMMAND --help describes a command. All commands read files of lockstep, of torch.save, of torch::save,
of TorchScript and of safetensors. They execute nothing that a file contains.

Examples:
  lockstep checkpoint ls checkpoints/
  lockstep checkpoint show checkpoints/best.pt
  lockstep checkpoint verify checkpoints/

Exit codes:
  0   success
  1   a file is damaged or cannot be read or written; diff: the files differ
  2   wrong usage
)";

/// Replaces this process, so that the terminal, signals and the exit code are those of the helper program. Returns only
/// if that fails.
int start_helper(const Arguments& arguments) {
  const auto program = tool::find_helper_program(kProgram).string();
  if (program.empty()) {
    std::cerr << fmt::format(
        "lockstep checkpoint: {} is neither beside lockstep nor in ../libexec/lockstep: build it with cmake --build "
        "build --target lockstep_checkpoint_program, or install lockstep again\n",
        kProgram);
    return 1;
  }
  auto words = to_words(arguments);
  words.insert(words.begin(), program);
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execv(program.c_str(), pointers.data());
  std::cerr << fmt::format("lockstep checkpoint: {} cannot be started: {}\n", program, std::strerror(errno));
  return 1;
}

}  // namespace
}  // namespace lockstep::checkpoint

void add_checkpoint(CLI::App& app, int& exit_code) {
  using lockstep::checkpoint::Arguments;
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("checkpoint", "List, show, verify, compare, convert and remove checkpoint files");
  lockstep::checkpoint::add_checkpoint_commands(*command, *arguments);
  command->footer(lockstep::checkpoint::kFooter);
  command->callback([arguments, &exit_code] { exit_code = lockstep::checkpoint::start_helper(*arguments); });
}
