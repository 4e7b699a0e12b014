#pragma once

#include <string>
#include <vector>

#include "cli/terminal.h"

namespace lockstep::tool {

/// kWarning: training works, but slower or less safely than it could. kError: training will not work with this setup.
enum class Status { kOk, kWarning, kError };

/// The result of one check. A warning or error always has a remedy; with kOk the remedy is optional advice.
struct Finding {
  std::string check;
  Status status = Status::kOk;
  std::string found;
  std::string remedy{};

  bool operator==(const Finding&) const = default;
};

/// Findings about one subject.
struct Section {
  std::string title;
  std::vector<Finding> findings;
};

inline const char* name_of(Status status) {
  if (status == Status::kOk) return "ok";
  return status == Status::kWarning ? "warning" : "error";
}

/// The number of findings with this status.
int count(const std::vector<Section>& sections, Status status);

/// The findings with their remedies below them, wrapped to the style's columns, and a summary: "12 ok, 2 warnings, 0
/// errors". A path longer than a line is broken after a slash.
std::string to_table(const std::vector<Section>& sections, const TableStyle& style);

/// One row of the table; `check_columns` is the width of the column with the checks' names.
std::string to_row(const Finding& finding, int check_columns, const TableStyle& style);

}  // namespace lockstep::tool
