#include "optim/shared_state.h"

#include <algorithm>
#include <atomic>

#include <ATen/ATen.h>

#include "comm/shared_memory_calls.h"

namespace lockstep::detail {

SharedState::SharedState(const ProcessGroup& group, const ShardedMemory& memory, size_t states, Undo undo)
    : memory_(memory), rank_(group.rank()) {
  const auto buffer = [&] { return allocate_shared(group, memory.elements(), memory.dtype(), kInConstructor); };
  for (size_t i = 0; i < states; ++i) states_.push_back(buffer());
  int64_t parts = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    pieces_.push_back(memory.pieces_of(rank));
    first_part_.emplace_back();
    for (const auto& piece : pieces_.back()) {
      first_part_.back().push_back(parts);
      parts += (piece.size + ElementUpdate::kSavedElements - 1) / ElementUpdate::kSavedElements;
    }
  }
  if (undo == Undo::kNone) return;
  for (size_t i = 0; i < 1 + states; ++i) before_.push_back(buffer());
  saved_ = allocate_shared(group, parts, at::kInt, kInConstructor);
}

ElementUpdate::Memory SharedState::of(const ShardPiece& piece) const {
  ElementUpdate::Memory memory;
  for (const auto& state : states_) memory.state.push_back(memory_.values(piece, state));
  if (before_.empty()) return memory;
  for (const auto& before : before_) memory.before.push_back(memory_.values(piece, before));
  const auto& mine = pieces_[static_cast<size_t>(rank_)];
  const auto index = static_cast<size_t>(std::find(mine.begin(), mine.end(), piece) - mine.begin());
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
          copy_elements(memory_.values(piece, before_[t]), live[t], begin, count);
      }
    }
}

}  // namespace lockstep::detail
