#pragma once

#include <memory>

#include <lockstep/backend.h>

namespace lockstep {

/// Ranks as threads of one process. Collective, like every factory of a backend.
std::unique_ptr<Backend> make_threads_backend(const BackendContext& context);

}  // namespace lockstep
