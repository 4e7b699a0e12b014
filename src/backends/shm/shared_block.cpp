#include "backends/shm/shared_block.h"

#include <algorithm>
#include <cstring>
#include <new>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::shm {

/// The header in front of the data.
struct alignas(4096) SharedBlock::Header {
  std::array<std::atomic<bool>, kMaxRanks> left{};  // by rank: does not use the data any more
};

namespace {

std::vector<std::shared_ptr<SharedMemory>> memories_of(const ShmGroup& group) {
  std::vector<std::shared_ptr<SharedMemory>> memories;
  for (int rank = 0; rank < group.size(); ++rank) memories.push_back(group.memory(rank));
  return memories;
}

}  // namespace

std::shared_ptr<SharedBlock> SharedBlock::create(const ShmGroup& group, size_t bytes) {
  try {
    // A block of at least kOwnPages begins at a page, as the header's alignment requires.
    char* block = group.arena()->allocate(std::max(sizeof(Header) + bytes, Arena::kOwnPages));
    new (block) Header;
    std::memset(block + sizeof(Header), 0, bytes);
    return std::shared_ptr<SharedBlock>(new SharedBlock(group, group.arena()->offset_of(block).value()));
  } catch (const SystemError& error) {
    log_warning(text("rank 0: ", error.what()));
    return nullptr;
  }
}

std::shared_ptr<SharedBlock> SharedBlock::open(const ShmGroup& group, uint64_t offset) {
  return std::shared_ptr<SharedBlock>(new SharedBlock(group, offset));
}

SharedBlock::SharedBlock(const ShmGroup& group, uint64_t offset)
    : rank_(group.rank()), arena_(group.arena()), memories_(memories_of(group)), offset_(offset) {}

// A rank that was killed does not set `left`; is_in_use() detects it.
SharedBlock::~SharedBlock() {
  if (!owner_.is_this()) return;  // a forked child: the parent still uses the data
  header().left[rank_] = true;
  if (rank_ != 0) return;
  arena_->retire({reinterpret_cast<char*>(&header())}, [&header = header(), memories = memories_] {
    for (size_t rank = 0; rank < memories.size(); ++rank)
      if (!header.left[rank] && memories[rank]->is_in_use()) return false;
    return true;
  });
}

SharedBlock::Header& SharedBlock::header() const {
  return *reinterpret_cast<Header*>(memories_[0]->begin() + offset_);
}

char* SharedBlock::data() const {
  return reinterpret_cast<char*>(&header() + 1);
}

}  // namespace lockstep::shm
