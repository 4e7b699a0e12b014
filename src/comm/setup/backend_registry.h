#pragma once

#include <lockstep/backend.h>

namespace lockstep {

/// The factory of a backend; UsageError naming those there are when there is none of that name.
BackendFactory find_backend(const std::string& name);

}  // namespace lockstep
