#include "cli/program_cutter.h"

#include <algorithm>
#include <regex>

#include "cli/nearest.h"

namespace {

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options())
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

bool is_streams(const std::string& argument) {
  static const std::regex kStreams("[0-3]|\\d+:[0-3](,\\d+:[0-3])*");
  return std::regex_match(argument, kStreams);
}

/// "--master_port=1" as {"--master-port", "=1"}; "-n4" as {"-n", "4"}.
std::pair<std::string, std::string> split_argument(const std::string& argument) {
  if (!argument.starts_with("--")) return {argument.substr(0, 2), argument.substr(2)};
  auto name = argument.substr(0, argument.find('='));
  auto value = argument.substr(name.size());
  std::replace(name.begin(), name.end(), '_', '-');
  return {name, value};
}

}  // namespace

std::vector<std::string> cut_program(const CLI::App& run, std::vector<std::string>& arguments) {
  std::vector<std::string> ours;
  size_t at = 0;
  while (at < arguments.size() && arguments[at].size() > 1 && arguments[at][0] == '-') {
    if (arguments[at] == "--") {
      ++at;
      break;
    }
    auto [name, value] = split_argument(arguments[at++]);
    const auto* option = run.get_option_no_throw(name);
    if (!option)
      throw CLI::ParseError("run: no option " + name + "." + suggestion(name, option_names(run)) +
                                " Options of the program stand behind its name.",
                            CLI::ExitCodes::ExtrasError);
    const bool has_value = option->get_items_expected_max() > 0;
    if (has_value && option->get_expected_min() == 0) {
      if (value.empty()) value = at < arguments.size() && is_streams(arguments[at]) ? arguments[at++] : "3";
      ours.push_back("--" + option->get_lnames()[0] + (value.starts_with('=') ? "" : "=") + value);
      continue;
    }
    ours.push_back(name + value);
    if (value.empty() && has_value && at < arguments.size()) ours.push_back(arguments[at++]);
  }
  std::vector<std::string> program(arguments.begin() + static_cast<ptrdiff_t>(at), arguments.end());
  arguments = std::move(ours);
  return program;
}
