#pragma once

#include <filesystem>
#include <string>

namespace lockstep::tool {

/// Where the program is that does with LibTorch what lockstep, which does not load it, cannot: beside lockstep, or in
/// ../libexec/lockstep where it is installed. Empty when it is in neither.
std::filesystem::path find_helper_program(const std::string& name);

}  // namespace lockstep::tool
