#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "bench/operation.h"
#include "bench/run_plan.h"

namespace lockstep::bench {

/// Which tensors are measured.
enum class Memory {
  kAllocated,  // from ProcessGroup::allocate
  kOrdinary,   // LibTorch's own
  kBoth,       // ordinary ones, and allocated ones where the backend's memory is another
};

const char* name_of(Memory memory);

/// A collective to measure: decided by lockstep, carried out by lockstep-bench, which gets it as JSON. Rank 0's results
/// are the Messages of messages.h.
struct Plan : RunPlan {
  Operation operation = Operation::kAllReduce;
  std::vector<std::string> backends{};
  std::vector<int64_t> sizes{};  // in bytes; of a barrier one, 0
  std::string dtype = "float32";
  std::string redop = "sum";  // "none" where nothing is reduced
  Memory memory = Memory::kBoth;

  bool operator==(const Plan&) const = default;
};

std::string to_text(const Plan& plan);
Plan plan_from(const std::string& text);

/// How large the ranks' common page is.
int64_t page_bytes(int ranks);

/// UsageError for a name that is no dtype.
int element_bytes(const std::string& dtype);

/// UsageError when docs/collectives.md has no result for it.
void check_reduction(const std::string& redop, const std::string& dtype);

std::vector<std::string> dtype_names();
std::vector<std::string> redop_names();

}  // namespace lockstep::bench
