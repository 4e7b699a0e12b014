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

/// "25M" in bytes: a whole number, and K, M or G for powers of 1024. UsageError naming `option` for another text.
int64_t parse_bytes(const std::string& option, const std::string& written);

/// "25M" of 26214400: the shortest text that parse_bytes reads as `bytes`.
std::string format_size(int64_t bytes);

/// least, least * factor, ... up to `most`, which is the last when the factor meets it.
std::vector<int64_t> size_range(int64_t least, int64_t most, int64_t factor);

/// The elements that each rank gives or gets: for all-gather and reduce-scatter, where the size is that of all ranks'
/// parts together, one rank's part. At least one.
int64_t element_count(Operation operation, int64_t bytes, int element_bytes, int ranks);

/// The largest buffer of a message of so many elements, which is what nccl-tests calls its size.
int64_t buffer_bytes(Operation operation, int64_t count, int element_bytes, int ranks);

/// The sizes rounded down to whole elements on every rank, each once.
std::vector<int64_t> round_to_elements(Operation operation, const std::vector<int64_t>& sizes, int element_bytes,
                                       int ranks);

/// How many calls make a sample: small messages are as short as a reading of the clock.
int calls_per_sample(int64_t bytes);

/// UsageError for a name that is no dtype.
int element_bytes(const std::string& dtype);

/// UsageError when docs/collectives.md has no result for it.
void check_reduction(const std::string& redop, const std::string& dtype);

std::vector<std::string> dtype_names();
std::vector<std::string> redop_names();

}  // namespace lockstep::bench
