#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bench/ranks/common_page.h"
#include "bench/ranks/ddp/training.h"

namespace lockstep::bench {

/// How many parameters get, in the first step of `ddp` on all ranks, another gradient than the mean of what `local`
/// computes for each rank's batch, by more than rounding explains. Collective, as a step of `ddp` is.
int64_t count_wrong_gradients(Training& ddp, Training& local, const std::string& model, int rank, int ranks);

/// How many of these tensors have other bits than rank 0's. Nothing of what is measured is asked. Collective.
int64_t count_out_of_step(const std::vector<at::Tensor>& tensors, CommonPage& page);

}  // namespace lockstep::bench
