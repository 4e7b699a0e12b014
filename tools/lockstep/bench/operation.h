#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::bench {

enum class Operation { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier };

/// The name on the command line, such as "all-reduce".
const char* name_of(Operation operation);

/// The collective with this name. Throws UsageError for an unknown name.
Operation operation_named(const std::string& name);

/// All names for the command line: the collectives, kDdp, kGpu and kCheckpoint.
std::vector<std::string> operation_names();

/// Operations that train models instead of calling a collective.
inline constexpr const char* kDdp = "ddp";
inline constexpr const char* kGpu = "gpu";

/// The operation that saves and loads a state.
inline constexpr const char* kCheckpoint = "checkpoint";

/// Whether the collective has a reduce operation.
bool reduces(Operation operation);

/// busbw / algbw, as defined by nccl-tests.
double bus_factor(Operation operation, int ranks);

/// The minimum number of bytes that all ranks together must read and write for a message of `bytes`.
double floor_traffic(Operation operation, int ranks, int64_t bytes);

/// Parses "25M": an integer with an optional K, M or G for powers of 1024. Throws UsageError with the name `option`
/// otherwise.
int64_t parse_bytes(const std::string& option, const std::string& written);

/// "25M" for 26214400: the shortest text that parse_bytes reads as `bytes`.
std::string format_size(int64_t bytes);

/// least, least * factor, ... up to and including `most`.
std::vector<int64_t> size_range(int64_t least, int64_t most, int64_t factor);

/// The number of elements per rank, at least one. For all-gather and reduce-scatter, whose size covers the parts of all
/// ranks, the elements of one part.
int64_t element_count(Operation operation, int64_t bytes, int element_bytes, int ranks);

/// The size of the largest buffer for `count` elements, which nccl-tests calls the size.
int64_t buffer_bytes(Operation operation, int64_t count, int element_bytes, int ranks);

/// Rounds the sizes down to whole elements on every rank and removes duplicates.
std::vector<int64_t> round_to_elements(Operation operation, const std::vector<int64_t>& sizes, int element_bytes,
                                       int ranks);

/// The number of calls in a sample: several for small messages, which take no longer than reading the clock.
int calls_per_sample(int64_t bytes);

/// The size of an element. Throws UsageError for an unknown dtype.
int element_bytes(const std::string& dtype);

/// Throws UsageError for combinations that docs/collectives.md does not define.
void check_reduction(const std::string& redop, const std::string& dtype);

std::vector<std::string> dtype_names();
std::vector<std::string> redop_names();

}  // namespace lockstep::bench
