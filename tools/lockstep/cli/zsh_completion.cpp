#include "cli/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::tool {
namespace {

/// Text within a specification of _arguments or _describe, which is itself within single quotes.
std::string escape_zsh(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    if (letter == '\'')
      result += "'\\''";
    else if (letter == ':' || letter == '[' || letter == ']' || letter == '\\')
      result += std::string("\\") + letter;
    else
      result += letter;
  }
  return result;
}

std::string action_of(const Value& value) {
  switch (value.completion) {
    case Completion::kNothing:
      return " ";  // only shows what is wanted
    case Completion::kFiles:
      return "_files";
    case Completion::kFolders:
      return "_files -/";
    case Completion::kWords:
      return fmt::format("({})", fmt::join(value.words, " "));
    case Completion::kProgram:
      return "_command_names -e";
  }
  return "";
}

/// How zsh is told where the value stands: in the next word too, or in the same word or not at all.
std::string with_value(const std::string& name, const Value& value) {
  const bool is_long = name.starts_with("--");
  if (value.name.empty()) return name;
  if (value.is_optional) return name + (is_long ? "=-" : "-");
  return name + (is_long ? "=" : "+");
}

/// '(-n --nproc-per-node)'{-n+,--nproc-per-node=}'[Workers on this node]:N:(cpu gpu)'
std::string option_specification(const Entry& option) {
  std::vector<std::string> names;
  for (const auto& name : option.names) names.push_back(with_value(name, option.value));
  auto listed = fmt::format("{}", fmt::join(names, ","));
  if (names.size() > 1) listed = "{" + listed + "}";
  std::string text = fmt::format("'({})'{}'[{}]", fmt::join(option.names, " "), listed, escape_zsh(option.description));
  if (!option.value.name.empty())
    text += fmt::format("{}{}:{}", option.value.is_optional ? "::" : ":", escape_zsh(option.value.name),
                        action_of(option.value));
  return text + "'";
}

/// '2:SHELL:(bash zsh)'; for a program also its arguments, which are completed as the program's own.
std::string positional_specification(const Value& value, int number) {
  const auto place = value.is_repeated ? "*" : std::to_string(number);
  if (value.completion == Completion::kProgram)
    return fmt::format("'(-){}:program:{}' '*::argument:_normal'", number, action_of(value));
  return fmt::format("'{}:{}:{}'", place, escape_zsh(value.name), action_of(value));
}

/// The specifications of all options and positionals, each on a line of its own.
std::string specifications(const Manual& manual, const std::string& indent) {
  std::string text;
  for (const auto& option : manual.options) text += " \\\n" + indent + option_specification(option);
  int number = 0;
  for (const auto& positional : manual.positionals)
    text += " \\\n" + indent + positional_specification(positional.value, ++number);
  return text;
}

}  // namespace

std::string zsh_completion(const Manual& lockstep) {
  std::string names, cases;
  for (const auto& command : lockstep.commands) {
    const auto name = last_word(command.name);
    names += fmt::format("        '{}:{}'\n", name, escape_zsh(command.description));
    cases += fmt::format("        {})\n          _arguments -s -S{} && found=0 ;;\n", name,
                         specifications(command, "            "));
  }
  return fmt::format(R"(#compdef lockstep
# Completes the words of lockstep in zsh; printed by `lockstep completion zsh`.

_lockstep() {{
  local curcontext=$curcontext state line found=1
  typeset -A opt_args
  _arguments -C{} \
    '1: :->command' '*:: :->argument' && found=0
  case $state in
    command)
      local -a commands=(
{}      )
      _describe -t commands command commands && found=0 ;;
    argument)
      curcontext=${{curcontext%:*:*}}:lockstep-$line[1]:
      case $line[1] in
{}      esac ;;
  esac
  return found
}}

if [[ $funcstack[1] == _lockstep ]]; then
  _lockstep "$@"  # found in fpath and called for the first time
else
  compdef _lockstep lockstep
fi
)",
                     specifications(lockstep, "    "), names, cases);
}

}  // namespace lockstep::tool
