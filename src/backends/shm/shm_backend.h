#pragma once

#include <memory>

#include <lockstep/backend.h>
#include <lockstep/error.h>

namespace lockstep {

/// The ranks are on one host, but cannot map each other's memory: thrown on all of them.
class NoSharedMemory : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Joins processes, or threads, of one host through memory that they share.
///
/// Tensors from allocate() live there and are reduced, gathered and scattered in offset, without a copy; any other
/// tensor goes through a pipeline of slots, in chunks that stay in the cache. Small ones travel with the call itself.
/// When a call fails, its tensor is out of the others' reach before the caller sees the error.
std::unique_ptr<Backend> make_shm_backend(const BackendContext& context);

}  // namespace lockstep
