#include "backends/shm/arena.h"

#include <unistd.h>

#include <algorithm>

#include <lockstep/error.h>

#include "base/align.h"
#include "base/text.h"
#include "base/variables.h"

namespace lockstep::shm {
namespace {

constexpr size_t kPopulated = 64 * 1024;            // smaller blocks of unnamed memory are allocated on first touch
constexpr size_t kKeptForReuse = 64 * 1024 * 1024;  // bytes that free blocks keep, about
constexpr size_t kMaxBytes = size_t{1} << 40;       // of address space: a process maps the arenas of all ranks

size_t reserved_bytes() {
  auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  auto value = process_variable("LOCKSTEP_SHM_BYTES");
  if (!value) return std::min(static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * page, kMaxBytes);
  constexpr int64_t kLeast = 16 << 20;
  auto bytes = parse_number<int64_t>(*value);
  if (!bytes || *bytes < kLeast) refuse_value("LOCKSTEP_SHM_BYTES", *value, text("a whole number from ", kLeast));
  return align_up(static_cast<size_t>(*bytes), page);
}

}  // namespace

std::shared_ptr<Arena> Arena::of_process() {
  static std::mutex mutex;
  static std::weak_ptr<Arena> current;  // guarded by mutex
  std::lock_guard lock(mutex);
  auto arena = current.lock();
  if (arena && arena->owner_.is_this()) return arena;
  arena = make_shared_owned<Arena>(SharedMemory::Kind::kUnnamed);
  current = arena;
  return arena;
}

Arena::Arena(SharedMemory::Kind kind) : kind_(kind), memory_(SharedMemory::create(kind, reserved_bytes())) {
  free_[kAlignment] = memory_->bytes() - kAlignment;
}

char* Arena::reserve(size_t bytes) {
  static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t unit = bytes >= kOwnPages ? page : kAlignment;
  const size_t size = align_up(std::max<size_t>(bytes, 1), unit);
  std::lock_guard lock(mutex_);
  free_retired();
  auto room = std::find_if(free_.begin(), free_.end(), [&](const auto& range) {
    return align_up(range.first, unit) + size <= range.first + range.second;
  });
  if (room == free_.end())
    throw SystemError(text("no room for ", bytes, " bytes of shared memory: this process has ", memory_->bytes(),
                           " bytes, as set by LOCKSTEP_SHM_BYTES or else by the machine's memory; allocate less, or "
                           "raise LOCKSTEP_SHM_BYTES"));
  const uint64_t begin = room->first;
  const uint64_t offset = align_up(begin, unit);
  const uint64_t end = begin + room->second;
  free_.erase(room);
  if (offset > begin) free_[begin] = offset - begin;
  if (offset + size < end) free_[offset + size] = end - offset - size;
  used_[offset] = size;
  kept_ -= std::min(kept_, size);
  return memory_->begin() + offset;
}

char* Arena::allocate(size_t bytes) {
  char* block = reserve(bytes);
  try {
    if (kind_ == SharedMemory::Kind::kNamed || bytes >= kPopulated) memory_->populate(*offset_of(block), bytes);
  } catch (...) {
    free(block);
    throw;
  }
  return block;
}

void Arena::free(char* block) {
  if (!owner_.is_this()) return;
  std::lock_guard lock(mutex_);
  free_block(block);
}

void Arena::free_block(char* block) {
  auto offset = static_cast<uint64_t>(block - memory_->begin());
  auto used = used_.find(offset);
  size_t size = used->second;
  used_.erase(used);
  if (is_detached(offset, offset + size)) return;
  if (kept_ + size > kKeptForReuse)
    memory_->release(offset, size);
  else
    kept_ += size;
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + size) {
    size += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

void Arena::retire(std::vector<char*> blocks, std::function<bool()> is_unused) {
  std::lock_guard lock(mutex_);
  retired_.push_back({std::move(blocks), std::move(is_unused)});
  free_retired();
}

void Arena::free_retired() {
  std::erase_if(retired_, [&](const Retired& retired) {
    if (!retired.is_unused()) return false;
    for (char* block : retired.blocks) free_block(block);
    return true;
  });
}

std::optional<uint64_t> Arena::offset_of(const void* data) const {
  if (!memory_->contains(data)) return std::nullopt;
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(data) - memory_->begin());
  if (!has_detached_) return offset;
  std::lock_guard lock(mutex_);
  return is_detached(offset, offset + 1) ? std::nullopt : std::optional(offset);
}

void Arena::detach(const void* data, size_t bytes) {
  const auto offset = static_cast<uint64_t>(static_cast<const char*>(data) - memory_->begin());
  std::lock_guard lock(mutex_);
  memory_->detach(offset, bytes);
  detached_[offset] = std::max(detached_[offset], bytes);
  has_detached_ = true;
}

bool Arena::is_detached(uint64_t begin, uint64_t end) const {
  return std::any_of(detached_.begin(), detached_.end(),
                     [&](const auto& range) { return range.first < end && begin < range.first + range.second; });
}

}  // namespace lockstep::shm
