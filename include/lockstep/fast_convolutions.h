#pragma once

#include <lockstep/export.h>

namespace lockstep {

/// Selects LibTorch's own convolutions where MKL-DNN has only its reference code: Debian's LibTorch 1.13 on arm64, on
/// which they are 2 to 4 times faster. Does nothing on other builds. Affects the whole process, so it is not the
/// default: call it at the start of main.
LOCKSTEP_EXPORT void prefer_fast_convolutions();

}  // namespace lockstep
