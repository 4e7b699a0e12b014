#include "cli/completion.h"

#include <algorithm>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include "cli/commands.h"

namespace lockstep::tool {
namespace {

// The part of the script that does not depend on the commands; the functions printed before it describe the commands.
// `kind` is the kind of completion for a word: words W..., files, folders, program, or text, which cannot be completed.
constexpr const char* kBashFunctions = R"(
_lockstep() {
  # Readline splits words at = and :. Join them again.
  local words=() starts=() word raw i is_joined=''
  for ((i = 0; i <= COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]} raw=$word
    local is_cut=''
    [[ $word && ! ${word//[=:]/} ]] && is_cut=yes raw=''
    if ((i > 1)) && [[ $is_cut || $is_joined ]]; then
      words[-1]+=$word
    else
      words+=("$word") starts+=("$i")
    fi
    is_joined=$is_cut
  done

  # Scan the words before the last for the command, the operand index, or the option whose value is completed.
  local last=$((${#words[@]} - 1)) command='' options='' operands=() more='' operand=0 kind='' no_options='' is_group=''
  _lockstep_command ''
  for ((i = 1; i < last; ++i)); do
    word=${words[i]}
    if [[ $word == -- && ! $no_options ]]; then
      no_options=yes
    elif [[ $word == -?* && ! $no_options ]]; then
      _lockstep_value "$command" "$word"
      [[ $kind ]] && ((++i))
    elif [[ ${operands[operand]-$more} == program ]]; then
      _lockstep_program "${starts[i]}"
      return
    elif [[ ! $is_group ]]; then
      ((++operand))
    else
      command+=${command:+ }$word
      _lockstep_command "$command"
    fi
  done

  local current=${words[last]} prefix=''
  if ((i > last)); then
    :  # the value of an option; kind is set
  elif [[ $current == --*=* && ! $no_options ]]; then
    prefix=${current%%=*}=
    _lockstep_value "$command" "${current%%=*}"
    current=${current#*=}
  elif [[ $current == -* && ! $no_options ]]; then
    kind="words $options"
  else
    kind=${operands[operand]-$more}
  fi
  _lockstep_reply
  COMPREPLY=("${COMPREPLY[@]/#/$prefix}")
  prefix=${words[last]%"$raw"}  # readline keeps the part it has split off
  COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}

# Offers completions of `kind` that start with `current`.
_lockstep_reply() {
  COMPREPLY=()
  case $kind in
    words*) mapfile -t COMPREPLY < <(compgen -W "${kind#words}" -- "$current") ;;
    files) _lockstep_files -f ;;
    folders) _lockstep_files -d ;;
    program)
      if [[ $current != */* ]]; then
        _lockstep_files -c -d
        return
      fi
      local file
      while IFS= read -r file; do
        [[ -x ${file/#\~/$HOME} ]] && COMPREPLY+=("$file")
      done < <(compgen -f -- "$current")
      compopt -o filenames 2>/dev/null ;;
  esac
}

_lockstep_files() {
  mapfile -t COMPREPLY < <(compgen "$@" -- "$current")
  compopt -o filenames 2>/dev/null
}

# Completes the arguments of the program at word $1: by the program's own completion, else files.
_lockstep_program() {
  local current=${COMP_WORDS[COMP_CWORD]}
  if declare -F _command_offset >/dev/null; then
    _command_offset "$1"
  else
    _lockstep_files -f
  fi
}

complete -F _lockstep lockstep
)";

std::string kind_of(const Value& value) {
  switch (value.completion) {
    case Completion::kNothing:
      return "text";
    case Completion::kFiles:
      return "files";
    case Completion::kFolders:
      return "folders";
    case Completion::kWords:
      return fmt::format("'words {}'", fmt::join(value.words, " "));
    case Completion::kProgram:
      return "program";
  }
  return "";
}

/// The name of a command in the script, such as "run" or "checkpoint ls"; empty for `lockstep` itself.
std::string key_of(const Manual& manual) {
  const auto space = manual.name.find(' ');
  return space == std::string::npos ? "" : manual.name.substr(space + 1);
}

/// The case of _lockstep_command with the options and operands of one command.
std::string command_case(const Manual& manual) {
  std::vector<std::string> names, operands;
  for (const auto& option : manual.options) names.insert(names.end(), option.names.begin(), option.names.end());
  std::string more;
  for (const auto& positional : manual.positionals) {
    operands.push_back(kind_of(positional.value));
    if (positional.value.is_repeated) more = operands.back();
  }
  std::vector<std::string> commands;
  for (const auto& command : manual.commands) commands.push_back(last_word(command.name));
  if (!commands.empty()) operands.push_back(fmt::format("'words {}'", fmt::join(commands, " ")));
  return fmt::format("    '{}')\n      options='{}'\n      operands=({}) more={} is_group={} ;;\n", key_of(manual),
                     fmt::join(names, " "), fmt::join(operands, " "), more.empty() ? "''" : more,
                     commands.empty() ? "''" : "yes");
}

/// The cases of _lockstep_value for the options of one command whose value is the next word.
std::string value_cases(const Manual& manual) {
  std::string text;
  for (const auto& option : manual.options) {
    if (option.value.name.empty() || option.value.is_optional) continue;
    std::vector<std::string> patterns;
    for (const auto& name : option.names) patterns.push_back(fmt::format("'{} {}'", key_of(manual), name));
    text += fmt::format("    {}) kind={} ;;\n", fmt::join(patterns, " | "), kind_of(option.value));
  }
  return text;
}

/// Escapes text for a single-quoted specification of _arguments or _describe.
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
      return " ";  // only shows the description
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

/// Marks where zsh expects the value: also in the next word, or, if optional, only in the same word.
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

/// '2:SHELL:(bash zsh)'. A program's arguments are completed by that program's completion.
std::string positional_specification(const Value& value, int number) {
  const auto place = value.is_repeated ? "*" : std::to_string(number);
  if (value.completion == Completion::kProgram)
    return fmt::format("'(-){}:program:{}' '*::argument:_normal'", number, action_of(value));
  return fmt::format("'{}:{}:{}'", place, escape_zsh(value.name), action_of(value));
}

/// The specifications of all options and positionals, one per line.
std::string specifications(const Manual& manual, const std::string& indent) {
  std::string text;
  for (const auto& option : manual.options) text += " \\\n" + indent + option_specification(option);
  int number = 0;
  for (const auto& positional : manual.positionals)
    text += " \\\n" + indent + positional_specification(positional.value, ++number);
  return text;
}

/// Appends the cases of a command and of its own commands.
void append_cases(const Manual& manual, std::string& commands, std::string& values) {
  commands += command_case(manual);
  values += value_cases(manual);
  for (const auto& command : manual.commands) append_cases(command, commands, values);
}

/// "_lockstep_checkpoint": the function that completes a command which has commands.
std::string function_name(const Manual& group) {
  auto name = "_" + group.name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

/// The functions for a command which has commands, innermost first.
std::string group_functions(const Manual& group) {
  std::string inner, names, cases;
  for (const auto& command : group.commands) {
    const auto name = last_word(command.name);
    names += fmt::format("        '{}:{}'\n", name, escape_zsh(command.description));
    if (!command.commands.empty()) inner += group_functions(command);
    cases += command.commands.empty() ? fmt::format("        {})\n          _arguments -s -S{} && found=0 ;;\n", name,
                                                    specifications(command, "            "))
                                      : fmt::format("        {}) {} && found=0 ;;\n", name, function_name(command));
  }
  return inner + fmt::format(R"({}() {{
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

)",
                             function_name(group), specifications(group, "    "), names, cases);
}

}  // namespace

std::string bash_completion(const Manual& lockstep) {
  std::string commands, values;
  append_cases(lockstep, commands, values);
  return fmt::format(
      "# Completion of lockstep for bash; printed by `lockstep completion bash`.\n\n"
      "# Sets the options and operands of command $1.\n"
      "_lockstep_command() {{\n  case $1 in\n{}    *) options='' operands=() more='' is_group='' ;;\n  esac\n}}\n\n"
      "# Sets the kind of value of option $2 of command $1; empty for a flag.\n"
      "_lockstep_value() {{\n  case \"$1 $2\" in\n{}    *) kind='' ;;\n  esac\n}}\n{}",
      commands, values, kBashFunctions);
}

std::string zsh_completion(const Manual& lockstep) {
  return fmt::format(R"(#compdef lockstep
# Completion of lockstep for zsh; printed by `lockstep completion zsh`.

{}if [[ $funcstack[1] == _lockstep ]]; then
  _lockstep "$@"  # found in fpath and called for the first time
else
  compdef _lockstep lockstep
fi
)",
                     group_functions(lockstep));
}

}  // namespace lockstep::tool

namespace {

constexpr const char* kCompletionFooter = R"(
For bash, source the script from ~/.bashrc. For zsh, put it into a folder of fpath as _lockstep before compinit is called.
`cmake --install` installs both scripts in the usual folders.

Examples:
  source <(lockstep completion bash)
  lockstep completion bash > ~/.local/share/bash-completion/completions/lockstep
  lockstep completion zsh > ~/.zfunc/_lockstep

Exit codes:
  0   the script was printed
  2   wrong usage, such as an unknown shell
)";

std::string check_shell(const std::string& shell) {
  return shell == "bash" || shell == "zsh" ? "" : "no completion for " + shell + ", only for bash and zsh";
}

}  // namespace

void add_completion(CLI::App& app, int& exit_code) {
  auto shell = std::make_shared<std::string>();
  auto* command = app.add_subcommand("completion", "Print a completion script for bash or zsh");
  command->add_option("shell", *shell, "The shell to generate the script for")
      ->required()
      ->type_name("bash|zsh")
      ->check(CLI::Validator(check_shell, ""));
  command->footer(kCompletionFooter);
  command->callback([shell, &app, &exit_code] {
    using namespace lockstep::tool;
    const auto manual = read_manual(app);
    std::cout << (*shell == "bash" ? bash_completion(manual) : zsh_completion(manual)) << std::flush;
    exit_code = 0;
  });
}
