#pragma once

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>
#include <lockstep/process_group.h>
#include <lockstep/training_state.h>

#include "base/error.h"
#include "base/text.h"

// How a CheckpointDirectory loads checkpoints, and the functions that saving and loading share.

namespace lockstep::detail {

// Entries of a checkpoint beside the parts of the state, the number and the shards.
constexpr const char* kMetrics = "metrics";
constexpr const char* kWorldSize = "world_size";
constexpr const char* kVersion = "lockstep";

/// Runs `body` and adds the name of a part of the state to its errors.
template <class Body>
void about_part(const char* doing, const std::string& name, const Body& body) {
  const auto prefix = text(doing, " '", name, "': ");
  try {
    body();
  } catch (const Error&) {
    rethrow_with_prefix(std::current_exception(), prefix);
  } catch (const c10::Error& error) {
    throw UsageError(text(prefix, error.what_without_backtrace()));
  }
}

/// Throws UsageError on all ranks unless the names of the parts are valid, and the same on all ranks. Collective.
void check_same_parts(const ProcessGroup& group, const TrainingState& state, const std::string& unit);

/// A checkpoint of which every rank has read the same bytes.
struct IntactCheckpoint {
  Value value;
  /// The shard with this rank's number, which this rank has read to verify it; none if there are fewer shards. apply()
  /// uses it, so that a job of as many ranks as the one that saved reads and hashes each shard once.
  std::optional<Value> shard{};
};

/// Loads checkpoints of a folder on all ranks. All ranks load the same bytes: each rank compares the bytes that it
/// reads with the checksums in the file, and their digest with the digest of rank 0. Ranks read different shards; each
/// rank verifies the shards that it reads with their digests in the main file.
class CheckpointLoader {
 public:
  CheckpointLoader(ProcessGroup group, std::string folder, std::string unit, bool strict)
      : group_(std::move(group)), folder_(std::move(folder)), unit_(std::move(unit)), strict_(strict) {}

  /// Returns, on all ranks, the last of the named checkpoints that is intact on all ranks. Appends the damage of the
  /// checkpoints after it to `damage`, which rank 0 also logs. `names` is used on rank 0. Collective.
  std::optional<IntactCheckpoint> find_intact(std::vector<std::string> names, std::vector<std::string>& damage) const;
  /// Loads a checkpoint into the state. Collective.
  void apply(const IntactCheckpoint& checkpoint, const TrainingState& state) const;

 private:
  bool is_first() const { return group_.rank() == 0; }
  std::string in_folder(const std::string& name) const { return text(folder_, "/", name); }
  std::string read(const std::string& path, Value& checkpoint) const;
  std::string compare(const std::string& path, const std::vector<std::string>& records) const;
  std::string verify_shards(const std::vector<ShardFile>& shards, std::optional<Value>& own) const;
  bool has_entry(const Value& checkpoint, const std::string& name) const;
  void apply_part(const StatePart& part, const IntactCheckpoint& checkpoint) const;

  const ProcessGroup group_;
  const std::string folder_;
  const std::string unit_;
  const bool strict_;
};

}  // namespace lockstep::detail
