#include "backends/nccl/nccl.h"

#include <sys/statvfs.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::nccl {
namespace {

// The default size of /dev/shm in a container is too small for NCCL with several ranks on one host.
std::string shared_memory_remedy(const std::string& words) {
  struct statvfs room {};
  if (words.find("shared memory") == std::string::npos || ::statvfs("/dev/shm", &room) != 0) return "";
  const uint64_t free_mib = uint64_t{room.f_bavail} * room.f_frsize >> 20;
  return text(". /dev/shm has ", free_mib,
              " MiB free; start the container with --shm-size=1g or --ipc=host, or set NCCL_SHM_DISABLE=1");
}

std::string words_of(ncclResult_t result, ncclComm_t communicator) {
  const char* last = ncclGetLastError(communicator);
  std::string words = ncclGetErrorString(result);
  if (last && *last) words += text(" (", last, ")");
  return words;
}

}  // namespace

void fail(ncclResult_t result, const std::string& doing, ncclComm_t communicator) {
  const auto words = words_of(result, communicator);
  const auto message = text("NCCL: ", doing, ": ", words, shared_memory_remedy(words));
  switch (result) {
    case ncclRemoteError:
      throw PeerError(message);
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      throw UsageError(message);
    default:
      throw SystemError(text(message, ". Set NCCL_DEBUG=WARN for details from NCCL"));
  }
}

bool reduces(ReduceOp op, at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
      return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct;
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong:
      return op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kMax;
    default:
      return false;
  }
}

ncclRedOp_t operation(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kAvg:
      return ncclAvg;
    case ReduceOp::kProduct:
      return ncclProd;
    case ReduceOp::kMin:
      return ncclMin;
    case ReduceOp::kMax:
      return ncclMax;
    default:
      throw Error("NCCL does not support this reduce operation");
  }
}

ncclDataType_t data_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kByte:
      return ncclUint8;
    case at::kChar:
      return ncclInt8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    default:
      throw Error(text("NCCL does not support dtype ", dtype));
  }
}

}  // namespace lockstep::nccl
