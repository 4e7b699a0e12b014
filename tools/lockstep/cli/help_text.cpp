#include "cli/help_text.h"

#include <unistd.h>

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/terminal.h"

namespace lockstep::tool {
namespace {

constexpr int kMaxHelpColumns = 100;
constexpr int kOptionColumns = 22;
constexpr char kUnbreakable = '\x1f';  // a non-breaking space

/// Formats two columns, the right one wrapped. Text too wide for the left column gets its own line.
std::string row(const std::string& left, const std::string& right, int left_columns, int columns) {
  const auto indent = static_cast<size_t>(left_columns) + 4;
  const auto lines = wrap(right, static_cast<size_t>(std::max(columns - left_columns - 4, 30)));
  std::string text = "  " + left;
  if (text.size() + 2 > indent) text += '\n';
  for (size_t i = 0; i < lines.size(); ++i)
    text += std::string(i == 0 && text.size() < indent ? indent - text.size() : indent, ' ') + lines[i] + '\n';
  std::replace(text.begin(), text.end(), kUnbreakable, ' ');
  return text;
}

std::string with_default_and_variable(const Entry& entry) {
  std::string text = entry.description;
  if (!entry.default_value.empty()) text += fmt::format(" [default:{}{}]", kUnbreakable, entry.default_value);
  if (!entry.variable.empty()) text += fmt::format(" [env:{}{}]", kUnbreakable, entry.variable);
  return text;
}

std::string row(const Entry& entry, int columns) {
  if (entry.names.empty()) return row(entry.value.name, with_default_and_variable(entry), kOptionColumns, columns);
  const bool is_long = entry.names[0].starts_with("--");  // without a short name: aligned with other long names
  const auto left = fmt::format("{}{}{}", is_long ? "    " : "", fmt::join(entry.names, ", "), value_text(entry.value));
  return row(left, with_default_and_variable(entry), kOptionColumns, columns);
}

std::string list_of_commands(const Manual& manual, int columns) {
  if (manual.commands.empty()) return "";
  size_t longest = 0;
  for (const auto& command : manual.commands) longest = std::max(longest, last_word(command.name).size());
  std::string text = "\nCommands:\n";
  for (const auto& command : manual.commands)
    text += row(last_word(command.name), command.description, static_cast<int>(longest), columns);
  return text;
}

std::string paragraph(const std::string& text, int columns) {
  return fmt::format("{}\n", fmt::join(wrap(text, static_cast<size_t>(columns)), "\n"));
}

std::string positional_usage(const Value& value) {
  if (value.completion == Completion::kProgram) return value.is_repeated ? "PROGRAM [ARGUMENT...]" : "PROGRAM";
  const auto name = value.name + (value.is_repeated ? "..." : "");
  return value.is_optional ? "[" + name + "]" : name;
}

}  // namespace

std::string usage(const Manual& manual) {
  std::string text = manual.name + (manual.commands.empty() ? " [OPTIONS]" : " COMMAND [OPTIONS]");
  for (const auto& positional : manual.positionals) text += " " + positional_usage(positional.value);
  return text;
}

std::string value_text(const Value& value) {
  if (value.name.empty()) return "";
  const auto name = value.name + (value.is_repeated ? "..." : "");
  return value.is_optional ? " [" + name + "]" : " " + name;
}

std::string help_text(const Manual& manual, int columns) {
  std::string text = paragraph(manual.description, columns);
  const auto usage_lines = wrap(usage(manual), static_cast<size_t>(columns - 7));
  text += fmt::format("\nUsage: {}\n", fmt::join(usage_lines, "\n       "));
  text += list_of_commands(manual, columns);
  if (!manual.positionals.empty()) text += "\nArguments:\n";
  for (const auto& positional : manual.positionals) text += row(positional, columns);
  for (size_t i = 0; i < manual.options.size(); ++i) {
    const auto& group = manual.options[i].group;
    if (i == 0 || group != manual.options[i - 1].group) text += "\n" + group + ":\n";
    text += row(manual.options[i], columns);
  }
  for (const auto& note : manual.notes) text += "\n" + paragraph(note, columns);
  for (const auto& section : manual.sections)
    text += fmt::format("\n{}:\n  {}\n", section.title, fmt::join(section.lines, "\n  "));
  return text;
}

int help_columns() {
  return ::isatty(STDOUT_FILENO) == 0 ? 80 : std::min(stdout_style().columns, kMaxHelpColumns);
}

}  // namespace lockstep::tool
