#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <c10/util/ArrayRef.h>

#include <lockstep/process_group.h>
#include <lockstep/value.h>

namespace lockstep::detail {

/// How much of a part the loop has received.
struct PartPosition {
  int64_t samples = 0;
  bool has_ended = false;
};

/// Returns the part of the next batch: of the parts that have not ended, the part with the fewest batches, the first of
/// several; none if all parts have ended. Depends on nothing else, so a resumed loop has the order of a loop that was
/// not interrupted.
std::optional<size_t> next_part(c10::ArrayRef<PartPosition> parts, int64_t batch_size);

/// The position of a StreamLoader's loop.
struct StreamPosition {
  int64_t epoch = 0;
  int64_t steps = 0;                  // batches that this rank has received in the epoch
  bool is_finished = false;           // the loop has ended: on this rank, or on all ranks if they end together
  std::vector<PartPosition> parts{};  // of this rank: part i is part rank + i * ranks of the job
};

/// The properties that a position inside an epoch depends on.
struct StreamLayout {
  int64_t parts = 1;  // of the job
  int64_t batch_size = 1;
  int64_t seed = 0;
};

/// Returns the positions of all ranks as one state. Collective. Throws MismatchError, on all ranks, if their epochs
/// differ.
Value save_position(const ProcessGroup& group, const StreamPosition& position, const StreamLayout& layout);

/// Returns the position of a rank in a state that any number of ranks have saved. Throws UsageError if the state is
/// damaged, or inside an epoch with another layout.
StreamPosition load_position(const Value& state, int rank, int ranks, const StreamLayout& layout);

}  // namespace lockstep::detail
