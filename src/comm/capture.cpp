#include "comm/capture.h"

#ifdef LOCKSTEP_HAVE_NCCL
#include "comm/nccl/gpu.h"
#endif

namespace lockstep::detail {

bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef LOCKSTEP_HAVE_NCCL
  if (device.is_cuda()) return nccl::is_capturing(device);
#endif
  return false;
}

}  // namespace lockstep::detail
