#pragma once

#include <memory>

#include "comm/capture.h"

namespace lockstep::nccl {

std::unique_ptr<detail::CaptureStream> make_capture_stream(c10::Device gpu);

}  // namespace lockstep::nccl
