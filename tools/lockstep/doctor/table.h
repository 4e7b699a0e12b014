#pragma once

#include <string>
#include <vector>

#include "cli/wrap.h"
#include "doctor/finding.h"

namespace lockstep::tool {

/// The findings with their remedies below them, in lines that fit, and a summary: "12 ok, 2 warnings, 0 errors". A path
/// that is longer than a line is broken behind a slash.
std::string to_table(const std::vector<Section>& sections, const TableStyle& style);

/// One of its rows, with a column of so many letters for the checks' names.
std::string to_row(const Finding& finding, int check_columns, const TableStyle& style);

}  // namespace lockstep::tool
