#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "bench/operation.h"

namespace lockstep::bench {

/// How the ranks are to measure, whatever it is.
struct RunPlan {
  int ranks = 2;
  int rounds = 0;  // 0: as many as fit into about a minute in all, 5 at least
  bool check = true;
  bool bind = false;            // give each rank cores of its own
  bool oversubscribed = false;  // more ranks than cores: who waits lets others run at once
  std::string page{};           // a file of page_bytes(ranks), zeros, that all ranks map
  std::string results{};        // a file that rank 0 writes to, a line of JSON for each message

  bool operator==(const RunPlan&) const = default;
};

/// Which tensors are measured.
enum class Memory {
  kAllocated,  // from ProcessGroup::allocate
  kOrdinary,   // LibTorch's own
  kBoth,       // ordinary ones, and allocated ones where the backend's memory is another
};

const char* name_of(Memory memory);

/// A collective to measure: decided by lockstep, carried out by lockstep-bench, which gets it as JSON. Rank 0's results
/// are the Messages of messages.h.
struct CollectivePlan : RunPlan {
  Operation operation = Operation::kAllReduce;
  std::vector<std::string> backends{};
  std::vector<int64_t> sizes{};  // in bytes; of a barrier one, 0
  std::string dtype = "float32";
  std::string redop = "sum";  // "none" where nothing is reduced
  Memory memory = Memory::kBoth;

  bool operator==(const CollectivePlan&) const = default;
};

std::string to_text(const CollectivePlan& plan);
CollectivePlan collective_plan_from(const std::string& text);

/// How large the ranks' common page is.
int64_t page_bytes(int ranks);

/// CollectiveSamples that a rank trains on in a step.
inline constexpr int kBatch = 32;

/// Models to train: decided by lockstep, carried out by lockstep-bench, which gets it as JSON. Rank 0's results are the
/// DdpMessages of messages.h.
struct DdpPlan : RunPlan {
  std::vector<std::string> models{};
  std::string backend = "auto";
  std::string python{};        // an interpreter that has torch; empty: PyTorch's own is not measured
  std::string python_store{};  // a file, empty at first, by which Python's ranks meet

  bool operator==(const DdpPlan&) const = default;
};

std::string to_text(const DdpPlan& plan);
DdpPlan ddp_plan_from(const std::string& text);

/// small, cnn and mlp: docs/bench.md has their layers.
std::vector<std::string> model_names();

/// What rank 0 tells lockstep, a line of JSON for each.

/// A size begins.
struct SizeStarted {
  int64_t bytes = 0;
  bool operator==(const SizeStarted&) const = default;
};

/// How long a flag takes from rank 0 to rank 1 and back; no times when there is no rank 1.
struct RoundTripTimes {
  std::vector<double> times_us{};
  bool operator==(const RoundTripTimes&) const = default;
};

/// How long all ranks together take to read and write memory of this size, each its own.
struct StreamTimes {
  int64_t bytes = 0;
  std::vector<double> times_us{};
  bool operator==(const StreamTimes&) const = default;
};

/// One backend's calls with messages of one size; a time is that of one call on the slowest rank.
struct CollectiveSamples {
  std::string backend{};
  std::string memory{};
  int64_t bytes = 0;
  int calls = 1;                   // in each sample
  std::optional<int64_t> wrong{};  // elements on all ranks in all samples; none: not checked
  std::vector<double> times_us{};
  bool operator==(const CollectiveSamples&) const = default;
};

/// In this order: the round trip; for each size its progress, stream and samples.
using CollectiveMessage = std::variant<SizeStarted, RoundTripTimes, StreamTimes, CollectiveSamples>;

std::string to_line(const CollectiveMessage& message);  // without a line end
CollectiveMessage collective_message_from(const std::string& line);

/// What rank 0 tells lockstep while models are trained, a line of JSON for each.

/// What holds for all models.
struct DdpSetup {
  std::string backend{};   // that `auto` has chosen
  std::string libtorch{};  // its version
  bool has_mkldnn = true;  // whether all sides may use MKL-DNN
  bool operator==(const DdpSetup&) const = default;
};

/// A model begins.
struct DdpModelStarted {
  std::string model{};
  bool operator==(const DdpModelStarted&) const = default;
};

/// The steps of one model; a time is that of one step on the slowest rank, one for each round.
struct DdpSamples {
  std::string model{};
  int steps = 1;      // in each sample
  int64_t wrong = 0;  // parameters on all ranks in all samples
  std::vector<double> local_us{};
  std::vector<double> ddp_us{};
  std::vector<double> alone_us{};
  std::vector<double> python_us{};  // empty: not measured
  bool operator==(const DdpSamples&) const = default;
};

/// In this order: the setting; for each model its progress and its samples.
using DdpMessage = std::variant<DdpSetup, DdpModelStarted, DdpSamples>;

std::string to_line(const DdpMessage& message);  // without a line end
DdpMessage ddp_message_from(const std::string& line);

}  // namespace lockstep::bench
