#include <lockstep/fast_convolutions.h>

#include <ATen/Context.h>

#include "comm/torch_version.h"

namespace lockstep {

void prefer_fast_convolutions() {
  if constexpr (detail::kMkldnnSlowsConvolutions) at::globalContext().setUserEnabledMkldnn(false);
}

}  // namespace lockstep
