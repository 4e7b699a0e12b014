#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <lockstep/launcher.h>

#include "cli/commands.h"
#include "run/child_process.h"

namespace lockstep::tool {
namespace {

constexpr const char* kScript = "compile_model.py";

constexpr const char* kFooter = R"(
MODEL.py:FUNCTION is a function without arguments that returns (module, inputs) or (module, inputs, loss). inputs is a
tuple of example tensors, or a list of such tuples, one for each set of sizes to compile. With a loss, the last input is
its target: the compiled model is called as net(x, y) and returns loss(module(x), y).

The file contains the graphs of forward, backward and evaluation as native code, and the initial parameters. It is for
the release of PyTorch, the kind of device, and the processor or GPU that compile it. docs/compiled.md describes how to
train it with lockstep::CompiledModule.

Python needs a PyTorch of the release that lockstep was built with. Compiling takes from 10 seconds for a small model to
minutes for a large one.

Examples:
  lockstep compile model.py:make -o model.pt2
  lockstep compile gpt.py:make -o gpt.pt2 --device cuda --autocast bfloat16
  lockstep compile gpt.py:make -o gpt.pt2 --python ~/torch/bin/python3

Exit codes:
  0   success
  1   the model cannot be compiled, or computes something else than in Python
  2   wrong usage
)";

struct CompileArguments {
  std::string function{};
  std::string output{};
  std::string device{};
  std::string autocast{};
  std::string precision = "highest";
  std::string python{};
  bool max_autotune = false;
  bool check = true;
};

/// "2.11" of "2.11.0+cu130".
std::string release_of(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

/// The version of PyTorch in this Python, without loading it; none if there is none.
std::optional<std::string> torch_of(const std::string& python) {
  const auto answer =
      run_program({"/usr/bin/env", python, "-c", "import importlib.metadata as m; print(m.version('torch'))"},
                  std::chrono::seconds(60));
  if (!answer.failure.empty()) return std::nullopt;
  return answer.output.substr(0, answer.output.find('\n'));
}

/// Returns a Python with the release of PyTorch that lockstep was built with: the one named, or the one whose LibTorch
/// it was, or one in PATH. Explains and returns an empty string if there is none.
std::string find_python(const std::string& named) {
  const std::string wanted = release_of(LOCKSTEP_TORCH_VERSION);
  std::vector<std::string> candidates{LOCKSTEP_TORCH_PYTHON, "python3", "/usr/bin/python3"};
  if (!named.empty()) candidates = {named};
  std::string tried;
  for (const auto& python : candidates) {
    if (python.empty()) continue;
    const auto version = torch_of(python);
    if (version && release_of(*version) == wanted) return python;
    tried += fmt::format("\n  {} has {}", python, version ? "PyTorch " + *version : "no PyTorch");
  }
  std::cerr << fmt::format(
      "lockstep compile: a python3 with PyTorch {0} is needed, the release that lockstep was built with: pip install "
      "torch=={0}.*, and name it by --python. Tried:{1}\n",
      wanted, tried);
  return "";
}

std::vector<std::string> to_words(const CompileArguments& arguments, const std::string& script) {
  std::vector<std::string> words{script,           arguments.function, "-o",
                                 arguments.output, "--precision",      arguments.precision};
  if (!arguments.device.empty()) words.insert(words.end(), {"--device", arguments.device});
  if (!arguments.autocast.empty()) words.insert(words.end(), {"--autocast", arguments.autocast});
  if (arguments.max_autotune) words.emplace_back("--max-autotune");
  if (!arguments.check) words.emplace_back("--no-check");
  return words;
}

/// Replaces this process by Python, so that the terminal, signals and the exit code are those of the script. Returns
/// only if that fails.
int start_python(const CompileArguments& arguments) {
  if (!LOCKSTEP_COMPILES_MODELS) {
    std::cerr << "lockstep compile: compiled models need LibTorch 2.11 or later, and this lockstep was built with "
              << LOCKSTEP_TORCH_VERSION << ": build it with a newer one\n";
    return 1;
  }
  const auto script = find_helper_program(kScript).string();
  if (script.empty()) {
    std::cerr << fmt::format(
        "lockstep compile: {} is neither beside lockstep nor in ../libexec/lockstep: install lockstep again\n",
        kScript);
    return 1;
  }
  const auto python = find_python(arguments.python);
  if (python.empty()) return 1;
  auto words = to_words(arguments, script);
  words.insert(words.begin(), python);
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  ::execvp(python.c_str(), pointers.data());
  std::cerr << fmt::format("lockstep compile: {} cannot be started: {}\n", python, std::strerror(errno));
  return 1;
}

}  // namespace
}  // namespace lockstep::tool

void add_compile(CLI::App& app, int& exit_code) {
  using lockstep::tool::CompileArguments;
  auto arguments = std::make_shared<CompileArguments>();
  auto* command = app.add_subcommand("compile", "Compile a Python model, forward and backward, for training in C++");
  command->add_option("function", arguments->function, "The Python file, and its function that makes the model")
      ->type_name("MODEL.py:FUNCTION")
      ->required();
  command->add_option("-o,--output", arguments->output, "The file to write, usually with the extension .pt2")
      ->type_name("FILE")
      ->required();
  command->add_option("--device", arguments->device, "The kind of device; default: that of the module's parameters")
      ->type_name("cpu|cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  command->add_option("--autocast", arguments->autocast, "Run the model and its loss under autocast to this dtype")
      ->type_name("DTYPE")
      ->check(CLI::IsMember({"bfloat16", "float16"}));
  command->add_option("--precision", arguments->precision, "The precision of products of float32 matrices; high: TF32")
      ->type_name("highest|high")
      ->check(CLI::IsMember({"highest", "high"}))
      ->capture_default_str();
  command->add_flag("--max-autotune", arguments->max_autotune,
                    "Measure more variants of each kernel; compiling takes several times as long");
  command->add_flag("--check,!--no-check", arguments->check,
                    "Compare results and gradients with the model in Python (default: on)");
  command
      ->add_option("--python", arguments->python,
                   "The Python that compiles; default: the one whose LibTorch lockstep was built with, or python3")
      ->type_name("PROGRAM");
  command->footer(lockstep::tool::kFooter);
  command->callback([arguments, &exit_code] { exit_code = lockstep::tool::start_python(*arguments); });
}
