#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::bench {

enum class Operation { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier };

/// "all-reduce", as users write it.
const char* name_of(Operation operation);

/// The collective of this name. UsageError for another name.
Operation operation_named(const std::string& name);

/// All that users may write: the collectives, kDdp and kGpu.
std::vector<std::string> operation_names();

/// Training of models, which is no collective: ddp/plan.h, and gpu/plan.h.
inline constexpr const char* kDdp = "ddp";
inline constexpr const char* kGpu = "gpu";

/// Whether it combines values, so that a reduce operation belongs to it.
bool reduces(Operation operation);

/// What the bytes of one rank times this are: bytes that each link must carry, as in nccl-tests.
double bus_factor(Operation operation, int ranks);

/// The bytes that memory must at least read and write, over all ranks, when `bytes` is the size of a message.
double floor_traffic(Operation operation, int ranks, int64_t bytes);

}  // namespace lockstep::bench
