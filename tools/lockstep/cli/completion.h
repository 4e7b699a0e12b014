#pragma once

#include <string>

#include "cli/manual.h"

namespace lockstep::tool {

/// A script that completes `lockstep`'s words in bash, once it is sourced. Needs nothing but bash 4.4; where
/// bash-completion is loaded, the arguments of a program are completed as the program's own.
std::string bash_completion(const Manual& lockstep);

/// The same for zsh: to be sourced after compinit, or to be found as `_lockstep` in a folder of fpath.
std::string zsh_completion(const Manual& lockstep);

}  // namespace lockstep::tool
