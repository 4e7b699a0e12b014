#include "doctor/findings.h"

#include <algorithm>

#include <fmt/format.h>

namespace lockstep::tool {
namespace {

constexpr const char* kBold = "1";
constexpr const char* kFaint = "2";
constexpr int kStatusColumns = 7;  // "warning"

const char* colour_of(Status status) {
  if (status == Status::kOk) return "32";
  return status == Status::kWarning ? "1;33" : "1;31";
}

std::string painted(const std::string& text, const char* colour, const TableStyle& style) {
  return style.colour ? fmt::format("\033[{}m{}\033[0m", colour, text) : text;
}

std::string summary(const std::vector<Section>& sections, const TableStyle& style) {
  const int warnings = count(sections, Status::kWarning);
  const int errors = count(sections, Status::kError);
  const std::string text = fmt::format("{} ok, {} warning{}, {} error{}", count(sections, Status::kOk), warnings,
                                       warnings == 1 ? "" : "s", errors, errors == 1 ? "" : "s");
  const Status worst = errors > 0 ? Status::kError : warnings > 0 ? Status::kWarning : Status::kOk;
  return painted(text, colour_of(worst), style) + "\n";
}

}  // namespace

int count(const std::vector<Section>& sections, Status status) {
  int number = 0;
  for (const auto& section : sections)
    number += static_cast<int>(std::count_if(section.findings.begin(), section.findings.end(),
                                             [&](const Finding& finding) { return finding.status == status; }));
  return number;
}

std::string to_row(const Finding& finding, int check_columns, const TableStyle& style) {
  const int indent = 2 + kStatusColumns + 2 + check_columns + 2;
  const size_t columns = static_cast<size_t>(std::max(style.columns - indent, 30));
  std::string text = fmt::format(
      "  {}  {:<{}}  ",
      painted(fmt::format("{:<{}}", name_of(finding.status), kStatusColumns), colour_of(finding.status), style),
      finding.check, check_columns);
  const auto found = wrap(finding.found, columns);
  for (size_t line = 0; line < found.size(); ++line)
    text += fmt::format("{:{}}{}\n", "", line == 0 ? 0 : indent, found[line]);
  if (finding.remedy.empty()) return text;
  const auto remedy = wrap(finding.remedy, columns - 3);
  const char* colour = finding.status == Status::kOk ? kFaint : "36";
  for (size_t line = 0; line < remedy.size(); ++line)
    text += fmt::format("{:{}}{}\n", "", indent, painted((line == 0 ? "-> " : "   ") + remedy[line], colour, style));
  return text;
}

std::string to_table(const std::vector<Section>& sections, const TableStyle& style) {
  size_t check_columns = 0;
  for (const auto& section : sections)
    for (const auto& finding : section.findings) check_columns = std::max(check_columns, finding.check.size());
  std::string text;
  for (const auto& section : sections) {
    text += painted(section.title, kBold, style) + "\n";
    for (const auto& finding : section.findings) text += to_row(finding, static_cast<int>(check_columns), style);
    text += "\n";
  }
  return text + summary(sections, style);
}

}  // namespace lockstep::tool
