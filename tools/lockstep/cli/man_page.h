#pragma once

#include <string>

#include "cli/manual.h"

namespace lockstep::tool {

/// The page of `lockstep` or of one of its commands, for man(1). `version` is shown at its foot.
std::string man_page(const Manual& manual, const std::string& version);

/// "lockstep-run" for "lockstep run", as with git: what man(1) finds it by.
std::string page_name(const Manual& manual);

}  // namespace lockstep::tool
