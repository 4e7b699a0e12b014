#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/operation.h"

namespace lockstep::bench {

/// "25M" in bytes: a whole number, and K, M or G for powers of 1024. UsageError naming `option` for another text.
int64_t parse_bytes(const std::string& option, const std::string& written);

/// "25M" of 26214400: the shortest text that parse_bytes reads as `bytes`.
std::string written_bytes(int64_t bytes);

/// least, least * factor, ... up to `most`, which is the last when the factor meets it.
std::vector<int64_t> stepped_sizes(int64_t least, int64_t most, int64_t factor);

/// The elements that each rank gives or gets: for all-gather and reduce-scatter, where the size is that of all ranks'
/// parts together, one rank's part. At least one.
int64_t count_of(Operation operation, int64_t bytes, int element_bytes, int ranks);

/// The largest buffer of a message of so many elements, which is what nccl-tests calls its size.
int64_t bytes_of(Operation operation, int64_t count, int element_bytes, int ranks);

/// The sizes rounded down to whole elements on every rank, each once.
std::vector<int64_t> whole_sizes(Operation operation, const std::vector<int64_t>& sizes, int element_bytes, int ranks);

/// How many calls make a sample: small messages are as short as a reading of the clock.
int calls_per_sample(int64_t bytes);

}  // namespace lockstep::bench
