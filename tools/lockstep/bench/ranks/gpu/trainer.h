#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

/// The names of the GPUs that can be measured; none where LibTorch is too old for what is trained.
std::vector<std::string> usable_gpus();

/// Trains on the first GPU what it is told on stdin, until that ends; `side` is plain, ddp or captured. gpu_trainer.py
/// does the same in Python, and has the requests.
void serve_trainer(const std::string& side);

}  // namespace lockstep::bench
