#pragma once

#include <string>
#include <vector>

#include "bench/ddp/row.h"

namespace lockstep::bench {

/// The times of each side of each model. What is no row begins with '#'.
std::string ddp_header();
std::string ddp_lines(const DdpRow& row);

/// How the sides of each model compare.
std::string ddp_comparison(const std::vector<DdpRow>& rows);

}  // namespace lockstep::bench
