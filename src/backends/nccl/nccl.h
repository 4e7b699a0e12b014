#pragma once

#include <nccl.h>

#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/reduce_op.h>

namespace lockstep::nccl {

/// Throws what an error of NCCL means here, with what NCCL says about it: PeerError, SystemError, or UsageError. The
/// communicator may be none.
[[noreturn]] void fail(ncclResult_t result, const std::string& doing, ncclComm_t communicator);

inline void check(ncclResult_t result, const char* doing, ncclComm_t communicator = nullptr) {
  if (result != ncclSuccess) fail(result, doing, communicator);
}

/// Whether NCCL itself reduces so: it lacks int16 and bool, and and, or and xor, and its minimum of floating-point
/// numbers passes NaN over.
bool reduces(ReduceOp op, at::ScalarType dtype);

/// Both only where it does.
ncclRedOp_t operation(ReduceOp op);
ncclDataType_t data_type(at::ScalarType dtype);

}  // namespace lockstep::nccl
