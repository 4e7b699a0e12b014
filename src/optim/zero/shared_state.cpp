#include "optim/zero/shared_state.h"

#include <algorithm>
#include <atomic>

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include "comm/shared_memory_calls.h"

namespace lockstep::detail {
namespace {

/// Copies `count` elements, in memory order, from `begin` on. Both tensors are dense. Several ranks may copy the same
/// values to the same place at once, so the elements are written atomically.
void restore_elements(const at::Tensor& from, const at::Tensor& to, int64_t begin, int64_t count) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, from.scalar_type(), "undo_step", [&] {
    const auto* values = static_cast<const scalar_t*>(from.data_ptr()) + begin;
    auto* place = static_cast<scalar_t*>(to.data_ptr()) + begin;
    for (int64_t i = 0; i < count; ++i) std::atomic_ref(place[i]).store(values[i], std::memory_order_relaxed);
  });
}

}  // namespace

SharedState::SharedState(const ProcessGroup& group, const ShardedMemory& memory, size_t states)
    : memory_(memory), rank_(group.rank()) {
  for (size_t i = 0; i < states; ++i)
    states_.push_back(allocate_shared(group, memory.elements(), memory.dtype(), kInConstructor));
}

void SharedState::keep_copies(const ProcessGroup& group) {
  int64_t parts = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    pieces_.push_back(memory_.pieces_of(rank));
    first_part_.emplace_back();
    for (const auto& piece : pieces_.back()) {
      first_part_.back().push_back(parts);
      parts += (piece.size + ElementUpdate::kSavedElements - 1) / ElementUpdate::kSavedElements;
    }
  }
  for (size_t i = 0; i < 1 + states_.size(); ++i)
    before_.push_back(allocate_shared(group, memory_.elements(), memory_.dtype(), kInConstructor));
  saved_ = allocate_shared(group, parts, at::kInt, kInConstructor);
}

ElementUpdate::Memory SharedState::of(const ShardPiece& piece) const {
  ElementUpdate::Memory memory;
  for (const auto& state : states_) memory.state.push_back(memory_.values(piece, state));
  if (before_.empty()) return memory;
  for (const auto& before : before_) memory.before.push_back(memory_.values(piece, before));
  const auto& own_pieces = pieces_[static_cast<size_t>(rank_)];
  const auto index = static_cast<size_t>(std::find(own_pieces.begin(), own_pieces.end(), piece) - own_pieces.begin());
  memory.saved = saved_.data_ptr<int32_t>() + first_part_[static_cast<size_t>(rank_)][index];
  return memory;
}

void SharedState::restore(int32_t step) const {
  for (size_t rank = 0; rank < pieces_.size(); ++rank)
    for (size_t i = 0; i < pieces_[rank].size(); ++i) {
      const auto& piece = pieces_[rank][i];
      std::vector<at::Tensor> live{memory_.values(piece)};
      for (const auto& state : states_) live.push_back(memory_.values(piece, state));
      int32_t* saved = saved_.data_ptr<int32_t>() + first_part_[rank][i];
      for (int64_t begin = 0; begin < piece.size; begin += ElementUpdate::kSavedElements, ++saved) {
        if (std::atomic_ref(*saved).load(std::memory_order_acquire) != step) continue;
        const int64_t count = std::min(ElementUpdate::kSavedElements, piece.size - begin);
        for (size_t t = 0; t < live.size(); ++t)
          restore_elements(memory_.values(piece, before_[t]), live[t], begin, count);
      }
    }
}

}  // namespace lockstep::detail
