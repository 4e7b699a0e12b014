#include "man_page.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>

#include "help_text.h"

namespace lockstep::tool {
namespace {

/// Text that roff prints as it stands, on a line of its own or within one.
std::string escaped(const std::string& text) {
  std::string result;
  if (text.starts_with('.') || text.starts_with('\'')) result = "\\&";  // else a request
  for (const char letter : text) {
    if (letter == '\\')
      result += "\\e";
    else if (letter == '-')
      result += "\\-";  // one that can be copied and searched for
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
    else
      result += letter;
  }
  return result;
}

std::string to_upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char letter) { return std::toupper(letter); });
  return text;
}

/// A description as the end of "NAME - description".
std::string in_sentence(std::string text) {
  const bool is_word = text.size() > 1 && std::islower(static_cast<unsigned char>(text[1])) != 0;
  if (is_word) text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return text;
}

std::string section(const std::string& title) {
  return fmt::format(".SH \"{}\"\n", escaped(to_upper(title)));
}

std::string heading(const Entry& entry) {
  if (entry.names.empty()) return fmt::format("\\fI{}\\fR", escaped(entry.value.name));
  std::string text;
  for (const auto& name : entry.names) text += fmt::format("{}\\fB{}\\fR", text.empty() ? "" : ", ", escaped(name));
  const auto value = value_text(entry.value);
  return value.empty() ? text : fmt::format("{}\\fI{}\\fR", text, escaped(value));
}

std::string item(const Entry& entry) {
  std::string text = fmt::format(".TP\n{}\n{}.\n", heading(entry), escaped(entry.description));
  if (!entry.default_value.empty()) text += fmt::format("Default: {}.\n", escaped(entry.default_value));
  if (!entry.variable.empty()) text += fmt::format("Environment: \\fB{}\\fR.\n", escaped(entry.variable));
  return text;
}

std::string options(const Manual& manual) {
  std::string text = section("Options"), group = "Options";
  for (const auto& option : manual.options) {
    if (option.group != group) text += fmt::format(".SS \"{}\"\n", escaped(option.group));
    group = option.group;
    text += item(option);
  }
  return text;
}

std::string commands(const Manual& manual) {
  if (manual.commands.empty()) return "";
  std::string text = section("Commands");
  for (const auto& command : manual.commands)
    text += fmt::format(".TP\n\\fB{}\\fR(1)\n{}.\n", escaped(page_name(command)), escaped(command.description));
  return text;
}

std::string verbatim(const ManualSection& block) {
  std::string text = section(block.title) + ".nf\n";
  for (const auto& line : block.lines) text += escaped(line) + "\n";
  return text + ".fi\n";
}

std::string see_also(const Manual& manual) {
  std::string text;
  for (const auto& command : manual.commands)
    text += fmt::format("{}\\fB{}\\fR(1)", text.empty() ? "" : ",\n", escaped(page_name(command)));
  if (manual.commands.empty()) text = "\\fBlockstep\\fR(1)";
  return section("See also") + text + "\n";
}

}  // namespace

std::string page_name(const Manual& manual) {
  auto name = manual.name;
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

std::string man_page(const Manual& manual, const std::string& version) {
  std::string text = fmt::format(".TH \"{}\" \"1\" \"\" \"lockstep {}\" \"lockstep\"\n.nh\n.ad l\n",
                                 escaped(to_upper(page_name(manual))), escaped(version));
  text += section("Name") +
          fmt::format("{} \\- {}\n", escaped(page_name(manual)), escaped(in_sentence(manual.description)));
  text += section("Synopsis") + escaped(usage(manual)) + "\n";
  text += section("Description") + escaped(manual.description) + ".\n";
  for (const auto& note : manual.notes) text += ".PP\n" + escaped(note) + "\n";
  text += commands(manual);
  if (!manual.positionals.empty()) text += section("Arguments");
  for (const auto& positional : manual.positionals) text += item(positional);
  text += options(manual);
  for (const auto& block : manual.sections) text += verbatim(block);
  return text + see_also(manual);
}

}  // namespace lockstep::tool
