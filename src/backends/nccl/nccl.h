#pragma once

#include <nccl.h>

#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/reduce_op.h>

namespace lockstep::nccl {

/// Throws the PeerError, UsageError or SystemError that corresponds to an NCCL error, with NCCL's description. The
/// communicator may be null.
[[noreturn]] void fail(ncclResult_t result, const std::string& doing, ncclComm_t communicator);

inline void check(ncclResult_t result, const char* doing, ncclComm_t communicator = nullptr) {
  if (result != ncclSuccess) fail(result, doing, communicator);
}

/// Whether NCCL supports the reduction. NCCL lacks int16, bool, and the operations and, or, xor. Its floating-point
/// minimum and maximum are not used, because they do not propagate NaN.
bool reduces(ReduceOp op, at::ScalarType dtype);

/// Both require reduces(op, dtype).
ncclRedOp_t operation(ReduceOp op);
ncclDataType_t data_type(at::ScalarType dtype);

}  // namespace lockstep::nccl
