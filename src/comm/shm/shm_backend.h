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
/// Tensors from allocate() live there, where the other ranks read them; any other tensor goes through a pipeline of
/// slots, in chunks that stay in the cache. Small ones travel with the call itself. No rank writes to another's
/// tensors: a rank that is late cannot harm one whose call has failed.
std::unique_ptr<Backend> make_shm_backend(const BackendContext& context);

}  // namespace lockstep
