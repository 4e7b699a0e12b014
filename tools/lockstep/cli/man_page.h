#pragma once

#include <string>

#include "cli/manual.h"

namespace lockstep::tool {

/// Returns the man page of `lockstep` or of one of its commands, in roff. `version` appears in the footer.
std::string man_page(const Manual& manual, const std::string& version);

/// The name of the page for man(1): "lockstep-run" for "lockstep run".
std::string page_name(const Manual& manual);

}  // namespace lockstep::tool
