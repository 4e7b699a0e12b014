#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::tool {

/// Lines of at most `columns`, broken between words and, in paths that are longer, behind slashes.
std::vector<std::string> wrap(const std::string& text, size_t columns);

}  // namespace lockstep::tool
