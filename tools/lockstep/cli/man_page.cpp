#include "cli/man_page.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <lockstep/version.h>

#include "cli/commands.h"
#include "cli/help_text.h"

namespace lockstep::tool {
namespace {

/// Escapes text, so that roff prints it verbatim at any place of a line.
std::string escape_roff(const std::string& text) {
  std::string result;
  if (text.starts_with('.') || text.starts_with('\'')) result = "\\&";  // would be parsed as a request
  for (const char letter : text) {
    if (letter == '\\')
      result += "\\e";
    else if (letter == '-')
      result += "\\-";  // an ASCII hyphen, which can be copied and searched
    else if (letter == '\'')
      result += "\\(aq";
    else if (letter == '`')
      result += "\\(ga";
    else if (letter == '^')
      result += "\\(ha";
    else if (letter == '~')
      result += "\\(ti";
    else if (letter == '"')
      result += "\\(dq";
    else if (letter == '|')
      result += "|\\:";  // a line may break here: lists of alternatives are longer than a line
    else
      result += letter;
  }
  return result;
}

/// A description for "NAME - description": starts in lower case.
std::string in_sentence(std::string text) {
  const bool is_word = text.size() > 1 && std::islower(static_cast<unsigned char>(text[1])) != 0;
  if (is_word) text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return text;
}

std::string section(const std::string& title) {
  return fmt::format(".SH \"{}\"\n", escape_roff(to_upper(title)));
}

std::string heading(const Entry& entry) {
  if (entry.names.empty()) return fmt::format("\\fI{}\\fR", escape_roff(entry.value.name));
  std::string text;
  for (const auto& name : entry.names) text += fmt::format("{}\\fB{}\\fR", text.empty() ? "" : ", ", escape_roff(name));
  const auto value = value_text(entry.value);
  return value.empty() ? text : fmt::format("{}\\fI{}\\fR", text, escape_roff(value));
}

std::string item(const Entry& entry) {
  std::string text = fmt::format(".TP\n{}\n{}.\n", heading(entry), escape_roff(entry.description));
  if (!entry.default_value.empty()) text += fmt::format("Default: {}.\n", escape_roff(entry.default_value));
  if (!entry.variable.empty()) text += fmt::format("Environment: \\fB{}\\fR.\n", escape_roff(entry.variable));
  return text;
}

std::string options(const Manual& manual) {
  std::string text = section("Options"), group = "Options";
  for (const auto& option : manual.options) {
    if (option.group != group) text += fmt::format(".SS \"{}\"\n", escape_roff(option.group));
    group = option.group;
    text += item(option);
  }
  return text;
}

std::string commands_section(const Manual& manual) {
  if (manual.commands.empty()) return "";
  std::string text = section("Commands");
  for (const auto& command : manual.commands)
    text += fmt::format(".TP\n\\fB{}\\fR(1)\n{}.\n", escape_roff(page_name(command)), escape_roff(command.description));
  return text;
}

std::string verbatim(const ManualSection& block) {
  std::string text = section(block.title) + ".nf\n";
  for (const auto& line : block.lines) text += escape_roff(line) + "\n";
  return text + ".fi\n";
}

std::string see_also(const Manual& manual) {
  std::string text;
  for (const auto& command : manual.commands)
    text += fmt::format("{}\\fB{}\\fR(1)", text.empty() ? "" : ",\n", escape_roff(page_name(command)));
  if (text.empty()) {
    auto parent = page_name(manual);
    parent.erase(std::min(parent.rfind('-'), parent.size()));
    text = fmt::format("\\fB{}\\fR(1)", escape_roff(parent));
  }
  return section("See also") + text + "\n";
}

bool write_page(const Manual& manual, const std::string& folder) {
  const auto path = folder + "/" + page_name(manual) + ".1";
  std::ofstream file(path);
  file << man_page(manual, LOCKSTEP_VERSION_STRING) << std::flush;
  if (!file)
    std::cerr << "lockstep: " << path << " cannot be written: check that " << folder
              << " is a folder with write permission\n";
  return static_cast<bool>(file);
}

/// The page of a command and those of its own commands.
bool write_pages(const Manual& manual, const std::string& folder) {
  bool is_written = write_page(manual, folder);
  for (const auto& command : manual.commands) is_written = is_written && write_pages(command, folder);
  return is_written;
}

}  // namespace

std::string page_name(const Manual& manual) {
  auto name = manual.name;
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string man_page(const Manual& manual, const std::string& version) {
  std::string text = fmt::format(".TH \"{}\" \"1\" \"\" \"lockstep {}\" \"lockstep\"\n.nh\n.ad l\n",
                                 escape_roff(to_upper(page_name(manual))), escape_roff(version));
  text += section("Name") +
          fmt::format("{} \\- {}\n", escape_roff(page_name(manual)), escape_roff(in_sentence(manual.description)));
  text += section("Synopsis") + escape_roff(usage(manual)) + "\n";
  text += section("Description") + escape_roff(manual.description) + ".\n";
  for (const auto& note : manual.notes) text += ".PP\n" + escape_roff(note) + "\n";
  text += commands_section(manual);
  if (!manual.positionals.empty()) text += section("Arguments");
  for (const auto& positional : manual.positionals) text += item(positional);
  text += options(manual);
  for (const auto& block : manual.sections) text += verbatim(block);
  return text + see_also(manual);
}

}  // namespace lockstep::tool

void add_man(CLI::App& app, int& exit_code) {
  auto folder = std::make_shared<std::string>();
  auto* command = app.add_subcommand("man", "Write the man pages (used by the build)")->group("");
  command->add_option("folder", *folder, "The folder to write to")->required()->type_name("DIR");
  command->callback([folder, &app, &exit_code] {
    using namespace lockstep::tool;
    exit_code = write_pages(read_manual(app), *folder) ? 0 : 1;
  });
}
