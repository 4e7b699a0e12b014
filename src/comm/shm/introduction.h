#pragma once

#include <memory>

#include <lockstep/backend.h>
#include <lockstep/error.h>

#include "comm/shm/circle.h"

namespace lockstep::shm {

/// The ranks are on one host, but cannot map each other's memory: thrown on all of them.
class NoSharedMemory : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Brings the ranks of a group to one circle: each shows the others, through the store, where its desk is, and makes
/// sure that it sees theirs. Collective.
std::unique_ptr<Circle> introduce(const BackendContext& context);

}  // namespace lockstep::shm
