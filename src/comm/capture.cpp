#include "comm/capture.h"

#ifdef LOCKSTEP_HAVE_NCCL
#include "comm/nccl/queued_on_stream.h"
#endif

namespace lockstep::detail {

bool is_capturing(c10::Device device) {
#ifdef LOCKSTEP_HAVE_NCCL
  if (device.is_cuda()) return nccl::capture_of(c10::cuda::getCurrentCUDAStream(device.index())) != 0;
#endif
  (void)device;
  return false;
}

}  // namespace lockstep::detail
