#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/completion.h"

namespace {

constexpr const char* kCompletionFooter = R"(
In bash, the script is best sourced from ~/.bashrc. In zsh, it goes into a folder of fpath, as _lockstep, before compinit
is called. `cmake --install` puts both where the shells look for them.

Examples:
  source <(lockstep completion bash)
  lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep
  lockstep completion zsh > ~/.zfunc/_lockstep

Exit codes:
  0   the script was printed
  2   wrong usage, such as a shell that is not known
)";

std::string refusal(const std::string& shell) {
  return shell == "bash" || shell == "zsh" ? "" : "there is no script for " + shell + ", only for bash and zsh";
}

}  // namespace

void add_completion(CLI::App& app, int& exit_code) {
  auto shell = std::make_shared<std::string>();
  auto* command = app.add_subcommand("completion", "Print the script by which bash or zsh completes lockstep's words");
  command->add_option("shell", *shell, "The shell that the script is for")
      ->required()
      ->type_name("bash|zsh")
      ->check(CLI::Validator(refusal, ""));
  command->footer(kCompletionFooter);
  command->callback([shell, &app, &exit_code] {
    using namespace lockstep::tool;
    const auto manual = read_manual(app);
    std::cout << (*shell == "bash" ? bash_completion(manual) : zsh_completion(manual)) << std::flush;
    exit_code = 0;
  });
}
