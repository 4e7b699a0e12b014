#include "cli/completion.h"

#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include "cli/commands.h"

namespace lockstep::tool {
namespace {

// What is the same for every table of commands; the functions printed before it tell what may be written where. `kind`
// is what completes a word: words W..., files, folders, program, or text, which only the user knows.
constexpr const char* kBashFunctions = R"(
_lockstep() {
  # Readline cuts words at = and :, which are put together again here.
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

  # Past the words before the last: which command it is, which operand, or the value of which option.
  local last=$((${#words[@]} - 1)) command='' options='' operands=() more='' operand=0 kind='' no_options=''
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
    elif [[ $command ]]; then
      ((++operand))
    else
      command=$word
      _lockstep_command "$command"
    fi
  done

  local current=${words[last]} prefix=''
  if ((i > last)); then
    :  # the value of an option, whose kind is known
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
  prefix=${words[last]%"$raw"}  # what readline has cut off keeps its place
  COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}

# Offers what is of `kind` and begins with `current`.
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

# The arguments of the program at $1: as that program has them completed, else files.
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

/// "run" in the scripts, or nothing for `lockstep` itself.
std::string key_of(const Manual& manual) {
  return manual.commands.empty() ? last_word(manual.name) : "";
}

/// The options and operands of one command, as a case of _lockstep_command.
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
  return fmt::format("    '{}')\n      options='{}'\n      operands=({}) more={} ;;\n", key_of(manual),
                     fmt::join(names, " "), fmt::join(operands, " "), more.empty() ? "''" : more);
}

/// The options of one command whose value is the next word, as cases of _lockstep_value.
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

std::string bash_completion(const Manual& lockstep) {
  std::string commands = command_case(lockstep), values = value_cases(lockstep);
  for (const auto& command : lockstep.commands) {
    commands += command_case(command);
    values += value_cases(command);
  }
  return fmt::format(
      "# Completes the words of lockstep in bash; printed by `lockstep completion bash`.\n\n"
      "# What may be written behind command $1.\n"
      "_lockstep_command() {{\n  case $1 in\n{}    *) options='' operands=() more='' ;;\n  esac\n}}\n\n"
      "# What the value of option $2 of command $1 is; nothing for a flag.\n"
      "_lockstep_value() {{\n  case \"$1 $2\" in\n{}    *) kind='' ;;\n  esac\n}}\n{}",
      commands, values, kBashFunctions);
}

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

std::string check_shell(const std::string& shell) {
  return shell == "bash" || shell == "zsh" ? "" : "there is no script for " + shell + ", only for bash and zsh";
}

}  // namespace

void add_completion(CLI::App& app, int& exit_code) {
  auto shell = std::make_shared<std::string>();
  auto* command = app.add_subcommand("completion", "Print the script by which bash or zsh completes lockstep's words");
  command->add_option("shell", *shell, "The shell that the script is for")
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
