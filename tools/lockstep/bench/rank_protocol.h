#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "bench/operation.h"

namespace lockstep::bench {

// The data that `lockstep bench` and its ranks, which run lockstep-bench, exchange: lockstep passes a plan as JSON on
// the command line, and rank 0 writes messages to a file, one JSON object per line.

/// The part of a plan that is common to all operations.
struct RunPlan {
  int ranks = 2;
  int rounds = 0;  // 0: as many as fit into about a minute in total, at least 5
  bool check = true;
  bool bind = false;            // pin each rank to its own cores
  bool oversubscribed = false;  // more ranks than cores: waiting ranks yield at once
  std::string page{};           // path of a zeroed file of page_bytes(ranks) that all ranks map: SharedPage
  std::string results{};        // path of the file for the messages of rank 0

  bool operator==(const RunPlan&) const = default;
};

/// Which tensors are measured.
enum class Memory {
  kAllocated,  // from ProcessGroup::allocate
  kOrdinary,   // from LibTorch's allocator
  kBoth,       // ordinary, and allocated if the backend has its own memory
};

const char* name_of(Memory memory);

/// A collective to measure. Rank 0 answers with CollectiveMessages.
struct CollectivePlan : RunPlan {
  Operation operation = Operation::kAllReduce;
  std::vector<std::string> backends{};
  std::vector<int64_t> sizes{};  // in bytes; for a barrier one entry, 0
  std::string dtype = "float32";
  std::string redop = "sum";  // "none" for collectives without reduction
  Memory memory = Memory::kBoth;

  bool operator==(const CollectivePlan&) const = default;
};

std::string to_text(const CollectivePlan& plan);
CollectivePlan collective_plan_from(const std::string& text);

/// The size of the ranks' shared page.
int64_t page_bytes(int ranks);

/// Samples per rank in a training step.
inline constexpr int kBatch = 32;

/// Models to train. Rank 0 answers with DdpMessages.
struct DdpPlan : RunPlan {
  std::vector<std::string> models{};
  std::string backend = "auto";
  std::string optimizer = "sgd";  // or "adamw": lockstep's FusedAdamW, and with shared parameters
  std::string python{};           // path of an interpreter that has torch; empty: Python is not measured
  std::string python_store{};     // path of an empty file for the FileStore of Python's ranks

  bool operator==(const DdpPlan&) const = default;
};

std::string to_text(const DdpPlan& plan);
DdpPlan ddp_plan_from(const std::string& text);

/// small, cnn and mlp; docs/bench.md describes them.
std::vector<std::string> model_names();

/// The measurement of a size begins.
struct SizeStarted {
  int64_t bytes = 0;
  bool operator==(const SizeStarted&) const = default;
};

/// Round-trip times of a flag from rank 0 to rank 1 and back.
struct RoundTripTimes {
  std::vector<double> times_us{};
  bool operator==(const RoundTripTimes&) const = default;
};

/// Times in which all ranks read and write memory of this size, each rank its own memory.
struct StreamTimes {
  int64_t bytes = 0;
  std::vector<double> times_us{};
  bool operator==(const StreamTimes&) const = default;
};

/// The times of one backend with one message size: one call on the slowest rank.
struct CollectiveSamples {
  std::string backend{};
  std::string memory{};
  int64_t bytes = 0;
  int calls = 1;                   // in each sample
  std::optional<int64_t> wrong{};  // wrong elements on all ranks in all samples; none: not checked
  std::vector<double> times_us{};
  bool operator==(const CollectiveSamples&) const = default;
};

/// Order: RoundTripTimes; then for each size SizeStarted, StreamTimes, and CollectiveSamples per backend and memory.
using CollectiveMessage = std::variant<SizeStarted, RoundTripTimes, StreamTimes, CollectiveSamples>;

std::string to_line(const CollectiveMessage& message);  // without a newline
CollectiveMessage collective_message_from(const std::string& line);

/// Settings that hold for all models.
struct DdpSetup {
  std::string backend{};   // the backend that `auto` selected
  std::string libtorch{};  // version of LibTorch
  bool has_mkldnn = true;  // whether MKL-DNN is enabled, on all sides
  bool operator==(const DdpSetup&) const = default;
};

/// The measurement of a model begins.
struct DdpModelStarted {
  std::string model{};
  bool operator==(const DdpModelStarted&) const = default;
};

/// The times of one model: one step on the slowest rank, one entry per round.
struct DdpSamples {
  std::string model{};
  int steps = 1;      // in each sample
  int64_t wrong = 0;  // wrong parameters on all ranks in all samples
  std::vector<double> local_us{};
  std::vector<double> ddp_us{};
  std::vector<double> shared_us{};  // empty: not measured
  std::vector<double> alone_us{};
  std::vector<double> python_us{};  // empty: not measured
  bool operator==(const DdpSamples&) const = default;
};

/// Order: DdpSetup; then for each model DdpModelStarted and DdpSamples.
using DdpMessage = std::variant<DdpSetup, DdpModelStarted, DdpSamples>;

std::string to_line(const DdpMessage& message);  // without a newline
DdpMessage ddp_message_from(const std::string& line);

}  // namespace lockstep::bench
