#include "cli/manual.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

namespace lockstep::tool {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool has_upper(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](unsigned char letter) { return std::isupper(letter); });
}

/// {"bash", "zsh"} from "TEXT:{bash,zsh}" or "ENUM:value in {bash->0,zsh->1}".
std::vector<std::string> checked_words(const std::string& type_name) {
  const auto begin = type_name.find('{'), end = type_name.find('}');
  if (begin == std::string::npos || end == std::string::npos) return {};
  auto words = split(type_name.substr(begin + 1, end - begin - 1), ',');
  for (auto& word : words) word = word.substr(0, word.find("->"));
  return words;
}

/// The type's name without the suffix of a check: "SECONDS" for "SECONDS:NONNEGATIVE". For CLI11's default names, the
/// check's name ("FILE" for "TEXT:FILE") or a more common word.
std::string value_name(const std::string& type_name) {
  const auto parts = split(type_name, ':');
  if (parts.empty()) return "VALUE";
  if (parts[0] == "INT" || parts[0] == "UINT") return "N";
  if (parts[0] == "FLOAT") return "NUMBER";
  if (parts[0] != "TEXT" || parts.size() == 1) return parts[0];
  if (const auto words = checked_words(type_name); !words.empty()) return fmt::format("{}", fmt::join(words, "|"));
  if (parts[1].starts_with("PATH")) return "FILE";
  return parts[1] == "FILE" || parts[1] == "DIR" ? parts[1] : parts[0];
}

/// The words to offer as completion: those that a check allows, else the lower-case alternatives, as in "N|cpu|gpu".
std::vector<std::string> words_of(const std::string& type_name) {
  if (const auto words = checked_words(type_name); !words.empty()) return words;
  auto words = split(value_name(type_name), '|');
  if (words.size() == 1) return {};
  std::erase_if(words, has_upper);
  return words;
}

Value value_of(const CLI::Option& option) {
  Value value;
  if (option.get_items_expected_max() == 0) return value;  // a flag
  value.name = value_name(option.get_type_name());
  value.is_optional = option.get_positional() ? !option.get_required() : option.get_expected_min() == 0;
  value.is_repeated = option.get_expected_max() > 1 && option.get_allow_extra_args();
  value.words = words_of(option.get_type_name());
  if (value.name == "FILE") value.completion = Completion::kFiles;
  if (value.name == "DIR") value.completion = Completion::kFolders;
  if (!value.words.empty()) value.completion = Completion::kWords;
  return value;
}

Entry read_positional(const CLI::Option& option) {
  Entry entry{.names = {},
              .value = value_of(option),
              .description = option.get_description(),
              .default_value = option.get_default_str(),
              .variable = option.get_envname(),
              .group = ""};
  const auto name = option.get_name(true);
  if (entry.value.words.empty()) entry.value.name = to_upper(name);
  if (name == "program") entry.value.completion = Completion::kProgram;
  return entry;
}

Entry read_option(const CLI::Option& option) {
  Entry entry{.names = {},
              .value = value_of(option),
              .description = option.get_description(),
              .default_value = option.get_default_str(),
              .variable = option.get_envname(),
              .group = option.get_group()};
  for (const auto& name : option.get_snames()) entry.names.push_back("-" + name);
  for (const auto& name : option.get_lnames()) entry.names.push_back("--" + name);
  return entry;
}

bool is_indented(const std::string& line) {
  return line.starts_with("  ");
}

void read_footer(const std::string& footer, Manual& manual) {
  const auto lines = split(footer, '\n');
  bool in_paragraph = false;
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto& line = lines[i];
    const bool is_title = line.ends_with(':') && i + 1 < lines.size() && is_indented(lines[i + 1]);
    if (is_title)
      manual.sections.push_back({line.substr(0, line.size() - 1), {}});
    else if (is_indented(line) && !manual.sections.empty())
      manual.sections.back().lines.push_back(line.substr(2));
    else if (!line.empty() && in_paragraph)
      manual.notes.back() += " " + line;
    else if (!line.empty())
      manual.notes.push_back(line);
    in_paragraph = !line.empty() && !is_title && !is_indented(line);
  }
}

std::string full_name(const CLI::App& app) {
  return app.get_parent() ? full_name(*app.get_parent()) + " " + app.get_name() : app.get_name();
}

}  // namespace

Manual read_manual(const CLI::App& app) {
  Manual manual;
  manual.name = full_name(app);
  manual.description = app.get_description();
  for (const auto* option : app.get_options()) {
    if (option->get_group().empty() || option == app.get_help_ptr()) continue;
    if (option->get_positional()) manual.positionals.push_back(read_positional(*option));
    if (option->nonpositional()) manual.options.push_back(read_option(*option));
  }
  if (app.get_help_ptr()) manual.options.push_back(read_option(*app.get_help_ptr()));
  read_footer(app.get_footer(), manual);
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!command->get_group().empty()) manual.commands.push_back(read_manual(*command));
  return manual;
}

std::string to_upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char letter) { return std::toupper(letter); });
  return text;
}

std::string last_word(const std::string& name) {
  return name.substr(name.rfind(' ') + 1);
}

}  // namespace lockstep::tool
