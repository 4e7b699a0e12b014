#pragma once

#include <memory>

#include <lockstep/backend.h>

namespace lockstep {

/// Ranks as processes with a GPU each, over NCCL. Calls are queued on the device: see Backend::queue. Collective.
/// UsageError when two ranks have the same GPU.
std::unique_ptr<Backend> make_nccl_backend(const BackendContext& context);

}  // namespace lockstep
