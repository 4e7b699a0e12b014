#pragma once

#include <string>
#include <vector>

#include "cli/terminal.h"

namespace lockstep::tool {

/// kWarning: training works, slower or with less safety than it could. kError: it will not work as it is set up.
enum class Status { kOk, kWarning, kError };

/// What one check of `lockstep doctor` says. A remedy stands with everything that is not ok; with ok it is advice.
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

/// How many findings have this status.
int count(const std::vector<Section>& sections, Status status);

/// The findings with their remedies below them, in lines that fit, and a summary: "12 ok, 2 warnings, 0 errors". A path
/// that is longer than a line is broken behind a slash.
std::string to_table(const std::vector<Section>& sections, const TableStyle& style);

/// One of its rows, with a column of so many letters for the checks' names.
std::string to_row(const Finding& finding, int check_columns, const TableStyle& style);

}  // namespace lockstep::tool
