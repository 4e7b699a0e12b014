#include "backends/shm/call_log.h"

#include <array>
#include <atomic>
#include <new>
#include <random>

#include <lockstep/error.h>

#include "base/text.h"
#include "rendezvous/process_id.h"
#include "rendezvous/store/protocol.h"

namespace lockstep::shm {
namespace {

std::string random_token() {
  std::random_device random;
  std::string token(16, '\0');
  for (char& byte : token) byte = static_cast<char>(random());
  return token;
}

}  // namespace

/// The log of one rank. Calls are numbered from 1; number 0 marks an entry that is being written.
struct CallLog::Page {
  struct Entry {
    std::atomic<uint64_t> number{0};
    std::atomic<uint64_t> fingerprint{0};
  };

  std::array<char, 16> token{};  // random: detects that the path now belongs to other memory
  std::array<Entry, kCalls> entries;

  static Page& of(const SharedMemory& memory) { return *reinterpret_cast<Page*>(memory.begin()); }
};

CallLog::CallLog(const BackendContext& context)
    : rank_(context.rank), own_memory_(SharedMemory::create(SharedMemory::Kind::kUnnamed, sizeof(Page))) {
  const auto token = random_token();
  auto* page = new (own_memory_->begin()) Page;
  std::copy(token.begin(), token.end(), page->token.begin());
  const auto host_id = this_process().host_id;
  const auto& handle = own_memory_->handle();
  const auto pages = context.store->all_gather(
      "call_log", rank_, context.size, pack({host_id, handle.path, handle.id, std::to_string(handle.bytes), token}),
      context.timeout);
  for (int rank = 0; rank < context.size; ++rank)
    other_memories_.push_back(rank == rank_ ? nullptr : find(pages[rank], host_id));
}

std::shared_ptr<SharedMemory> CallLog::find(const std::string& offer, const std::string& host_id) {
  const auto fields = unpack(offer);
  if (fields.at(0) != host_id) return nullptr;
  try {
    auto memory = SharedMemory::open({fields.at(1), fields.at(2), static_cast<size_t>(to_number(fields.at(3))), false});
    const auto& token = Page::of(*memory).token;
    return std::string_view(token.data(), token.size()) == fields.at(4) ? memory : nullptr;
  } catch (const SystemError&) {
    return nullptr;
  }
}

void CallLog::write(uint64_t fingerprint) {
  const uint64_t number = ++calls_;
  auto& entry = Page::of(*own_memory_).entries[number % kCalls];
  entry.number.store(0);
  entry.fingerprint.store(fingerprint);
  entry.number.store(number);
  for (size_t rank = 0; rank < other_memories_.size(); ++rank) {
    if (!other_memories_[rank]) continue;
    const auto& other_entry = Page::of(*other_memories_[rank]).entries[number % kCalls];
    if (other_entry.number.load() != number) continue;
    const uint64_t other_fingerprint = other_entry.fingerprint.load();
    if (other_entry.number.load() == number && other_fingerprint != fingerprint)
      throw MismatchError(text("rank ", rank, " makes a different call at this position"));
  }
}

}  // namespace lockstep::shm
