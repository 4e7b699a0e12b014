#pragma once

#include <memory>

#include <lockstep/backend.h>

namespace lockstep {

/// TCP between processes on one or several hosts. Collective.
///
/// Gloo carries the messages; the algorithms are ours. Its own round half precision at every step, and have neither AVG
/// nor bfloat16.
std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context);

}  // namespace lockstep
