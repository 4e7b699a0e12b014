#pragma once

#include <string>

#include "cli/manual.h"

namespace lockstep::tool {

/// Returns a script for bash that completes the command line of `lockstep`. Needs bash 4.4. If bash-completion is
/// loaded, the arguments of a program are completed by that program's completion.
std::string bash_completion(const Manual& lockstep);

/// The same for zsh: to be sourced after compinit, or installed as `_lockstep` in a folder of fpath.
std::string zsh_completion(const Manual& lockstep);

}  // namespace lockstep::tool
