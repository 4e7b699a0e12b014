#include "checkpoint/arguments.h"

#include <cmath>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

namespace lockstep::checkpoint {
namespace {

constexpr const char* kLsFooter = R"(
Files are called step-00000100.pt or epoch-00000003.pt. Shard files, such as step-00000100.shard-0-of-2-1a2b3c4d.pt,
are counted with their main file. Only names and sizes of tensors are read, so damaged tensors are not noticed: use
verify.

Examples:
  lockstep checkpoint ls checkpoints/
  lockstep checkpoint ls --json checkpoints/ best.pt

Exit codes:
  0   all files were listed
  1   a file cannot be read; the others were listed
  2   wrong usage, such as a path that does not exist
)";

constexpr const char* kShowFooter = R"(
The statistics of a tensor are computed in double precision, over its finite elements. For a folder, the newest
checkpoint in its folder checkpoints, or, if there is none, in the folder itself is printed.

Examples:
  lockstep checkpoint show step-00000100.pt
  lockstep checkpoint show runs/a
  lockstep checkpoint show step-00000100.pt --tensor 'model.*.weight'

Exit codes:
  0   the file was printed
  1   the file is damaged or cannot be read
  2   wrong usage, such as a file that does not exist
)";

constexpr const char* kVerifyFooter = R"(
Files of lockstep have a SHA-256 of every record and of the whole file. Other files of PyTorch have only a CRC-32 of each
record; safetensors files have no checksums, only their structure is checked. In a folder all checkpoint files are
verified. For the main file of a sharded checkpoint, each of its shards must exist and be the one that it lists.

Examples:
  lockstep checkpoint verify checkpoints/
  lockstep checkpoint verify --json step-00000100.pt

Exit codes:
  0   all files are intact
  1   at least one file is damaged, incomplete or cannot be read
  2   wrong usage, such as a path that does not exist
)";

constexpr const char* kDiffFooter = R"(
Entries are compared by their dotted path, such as optimizer.state.0.exp_avg. NaN is equal to NaN.

Examples:
  lockstep checkpoint diff step-00000100.pt step-00000200.pt
  lockstep checkpoint diff --tolerance 1e-6 a.pt b.safetensors

Exit codes:
  0   equal
  1   different
  2   wrong usage, or a file does not exist, is damaged or cannot be read
)";

constexpr const char* kConvertFooter = R"(
The extension of OUT selects the format: .pt or .pth for PyTorch's format, .safetensors for safetensors. IN can be a file
of lockstep, of torch.save, of torch::save, of TorchScript (its code is left out), or a safetensors file. safetensors
files contain only tensors; names of nested tensors are joined with dots. A note on stderr lists what was left out, and
tensors that shared memory and were written more than once. The shards of a checkpoint are merged.

Examples:
  lockstep checkpoint convert --key model best.pt model.safetensors
  lockstep checkpoint convert model.safetensors model.pt
  lockstep checkpoint convert script.pt weights.pt

Exit codes:
  0   OUT was written
  1   IN is damaged or cannot be read, or OUT cannot be written
  2   wrong usage, such as a file or a key that does not exist
)";

constexpr const char* kPruneFooter = R"(
Files are called step-00000100.pt or epoch-00000003.pt; each unit is counted separately. Never removes best.pt, the file
that best.pt or another link in the folder points to, or shards that best.pt uses. Other files are left alone.

Examples:
  lockstep checkpoint prune checkpoints/ --keep-last 3 --dry-run
  lockstep checkpoint prune checkpoints/ --keep-last 3 --keep-every 1000

Exit codes:
  0   the files were removed, or there were none to remove
  1   a file could not be read or removed
  2   wrong usage, such as a folder that does not exist
)";

CLI::Validator is_tolerance() {
  return CLI::Validator(
      [](std::string& written) {
        double number = 0;
        const bool is_valid = CLI::detail::lexical_cast(written, number) && std::isfinite(number) && number >= 0;
        return is_valid ? std::string() : fmt::format("{} is not valid: it must be a number of 0 or more", written);
      },
      "");
}

CLI::Validator is_count() {
  return CLI::Validator(
      [](std::string& written) {
        int64_t number = 0;
        const bool is_valid = CLI::detail::lexical_cast(written, number) && number >= 1;
        return is_valid ? std::string() : fmt::format("{} is not valid: it must be an integer of 1 or more", written);
      },
      "");
}

CLI::App& add_command(CLI::App& app, Arguments& arguments, const char* name, const char* description,
                      const char* footer) {
  auto& command = *app.add_subcommand(name, description);
  command.add_flag("--json", arguments.json, "Print JSON, one object per line");
  command.footer(footer);
  command.callback([&arguments, name] { arguments.command = name; });
  return command;
}

void add_paths(CLI::App& command, Arguments& arguments) {
  command.add_option("path", arguments.paths, "Checkpoint files, or folders with checkpoint files")
      ->required()
      ->type_name("FILE");
}

void add_path(CLI::App& command, const char* name, std::string& path, const char* description,
              const char* type = "FILE") {
  command.add_option(name, path, description)->required()->type_name(type);
}

}  // namespace

void add_checkpoint_commands(CLI::App& app, Arguments& arguments) {
  app.require_subcommand(1);
  add_paths(add_command(app, arguments, "ls", "List checkpoint files", kLsFooter), arguments);

  auto& show =
      add_command(app, arguments, "show", "Print the entries of a file and a summary of its tensors", kShowFooter);
  add_path(show, "file", arguments.first, "The checkpoint file, or the folder of a run");
  show.add_option("--tensor", arguments.tensor_glob, "Only tensors whose name matches, as in 'model.*'")
      ->type_name("GLOB");

  add_paths(add_command(app, arguments, "verify", "Compare files with their checksums", kVerifyFooter), arguments);

  auto& diff = add_command(app, arguments, "diff", "Compare the contents of two files", kDiffFooter);
  add_path(diff, "a", arguments.first, "A checkpoint file");
  add_path(diff, "b", arguments.second, "The file to compare it with");
  diff.add_option("--tolerance", arguments.tolerance, "Largest absolute difference of numbers that counts as equal")
      ->type_name("NUMBER")
      ->check(is_tolerance())
      ->capture_default_str();

  auto& convert =
      add_command(app, arguments, "convert", "Convert between PyTorch's format and safetensors", kConvertFooter);
  add_path(convert, "in", arguments.first, "The file to read");
  add_path(convert, "out", arguments.second, "The file to write: .pt, .pth or .safetensors");
  convert.add_option("--key", arguments.key, "Convert only this entry, such as model or state_dict")->type_name("NAME");
  convert.add_flag("--force", arguments.force, "Replace OUT if it exists");

  auto& prune = add_command(app, arguments, "prune", "Remove old checkpoint files from a folder", kPruneFooter);
  add_path(prune, "dir", arguments.first, "The folder", "DIR");
  prune.add_option("--keep-last", arguments.keep_last, "Keep the N files with the highest numbers")
      ->required()
      ->type_name("N")
      ->check(is_count());
  prune.add_option("--keep-every", arguments.keep_every, "Also keep files whose number is a multiple of M")
      ->type_name("M")
      ->check(is_count());
  prune.add_flag("--dry-run", arguments.dry_run, "Print what would be removed, and remove nothing");
}

std::vector<std::string> to_words(const Arguments& arguments) {
  std::vector<std::string> words{arguments.command};
  const auto add = [&](const char* name, const std::string& value) {
    words.push_back(fmt::format("{}={}", name, value));
  };
  if (arguments.json) words.emplace_back("--json");
  if (!arguments.tensor_glob.empty()) add("--tensor", arguments.tensor_glob);
  if (arguments.tolerance > 0) add("--tolerance", fmt::format("{:.17g}", arguments.tolerance));
  if (!arguments.key.empty()) add("--key", arguments.key);
  if (arguments.force) words.emplace_back("--force");
  if (arguments.keep_last > 0) add("--keep-last", std::to_string(arguments.keep_last));
  if (arguments.keep_every > 0) add("--keep-every", std::to_string(arguments.keep_every));
  if (arguments.dry_run) words.emplace_back("--dry-run");
  words.emplace_back("--");  // a path may begin with a dash
  words.insert(words.end(), arguments.paths.begin(), arguments.paths.end());
  for (const auto& path : {arguments.first, arguments.second})
    if (!path.empty()) words.push_back(path);
  return words;
}

}  // namespace lockstep::checkpoint
