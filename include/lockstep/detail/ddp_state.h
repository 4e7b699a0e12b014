#pragma once

#include <memory>

#include <lockstep/export.h>

namespace lockstep {

class DistributedDataParallelBase;

namespace detail {

class DdpState;
/// For classes that work with the wrapper, such as ZeroRedundancyOptimizer.
DdpState& ddp_state(const DistributedDataParallelBase& ddp);

/// Disables gradient averaging while it exists.
class LOCKSTEP_EXPORT NoSync {
 public:
  explicit NoSync(std::shared_ptr<DdpState> replica);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<DdpState> replica_;
  bool was_enabled_;
};

}  // namespace detail

}  // namespace lockstep
