#include "backends/shm/shm_group.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <random>
#include <thread>

#include <lockstep/error.h>

#include "backends/common/agree.h"
#include "backends/factories.h"
#include "base/log.h"
#include "base/text.h"
#include "rendezvous/store/protocol.h"

namespace lockstep::shm {
namespace {

// Counts the cores of all ranks together: ranks that are bound to cores have few cores each.
Waiter::Cores count_cores(const std::vector<ShmGroup::Member>& members) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const auto& member : members) CPU_OR(&all, &all, &member.segment->cores);
  return static_cast<int>(members.size()) <= CPU_COUNT(&all) ? Waiter::Cores::kEnough : Waiter::Cores::kTooFew;
}

}  // namespace

ShmGroup::ShmGroup(int rank, std::vector<Member> members, std::shared_ptr<Arena> arena)
    : rank_(rank),
      members_(std::move(members)),
      arena_(std::move(arena)),
      waiter_(segment(rank_), count_cores(members_)) {}

// A rank that was killed does not set `left`; is_in_use() detects it.
ShmGroup::~ShmGroup() {
  for (const auto& member : members_) member.segment->left[rank_] = true;
  const RankSegment& own_segment = segment(rank_);
  freed_when_all_left_.push_back(reinterpret_cast<char*>(&segment(rank_)));
  arena_->retire(std::move(freed_when_all_left_), [&own_segment, members = members_] {
    for (size_t rank = 0; rank < members.size(); ++rank)
      if (!own_segment.left[rank] && members[rank].memory->is_in_use()) return false;
    return true;
  });
}

void ShmGroup::begin_call(const CallInfo& call, uint64_t offset, const void* payload, size_t payload_bytes) {
  ++call_;
  CallHeader& own_header = segment(rank_).headers[call_ % 2];
  own_header.fingerprint = call.fingerprint;
  own_header.offset = offset;
  if (payload_bytes > 0) std::memcpy(own_header.payload.data(), payload, payload_bytes);
  own_header.call.store(call_);
  wake_others();
  for (int step = 1; step < size(); ++step) {
    int peer = (rank_ + step) % size();
    const CallHeader& peer_header = header(peer);
    waiter_.until([&] { return peer_header.call.load() >= call_; }, peer, call.deadline);
    if (peer_header.fingerprint != call.fingerprint)
      throw MismatchError(text("rank ", peer, " makes a different call than rank ", rank_));
  }
}

void ShmGroup::end_call(Deadline deadline) {
  raise(segment(rank_).done, call_);
  await(&RankSegment::done, call_, deadline);
}

void ShmGroup::give_up_call() noexcept {
  raise(segment(rank_).gave_up, call_);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before the caller's next write to the tensor
}

// A peer publishes its header, then checks gave_up, and only then writes to other tensors. This rank has raised gave_up
// and then reads the header. So a peer whose header is not visible yet will see the flag before it writes. A peer that
// gave up makes no further call.
bool ShmGroup::may_write(int peer) const {
  const RankSegment& peer_segment = segment(peer);
  return header(peer).call.load() >= call_ && peer_segment.done.value.load() < call_ &&
         peer_segment.gave_up.value.load() == 0 && members_[peer].memory->is_in_use();
}

bool ShmGroup::await_release(std::chrono::milliseconds limit) const {
  constexpr std::chrono::microseconds kPause(100);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (int peer = 0; peer < size(); ++peer) {
    const bool is_thread = members_[peer].memory->is_created_here();
    while (peer != rank_ && may_write(peer)) {
      if (!is_thread && std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(kPause);
    }
  }
  return true;
}

// Data that was read before this check is valid if the flag is still down: a rank raises the flag before its tensor
// changes.
void ShmGroup::check_no_rank_gave_up() const {
  for (int peer = 0; peer < size(); ++peer) {
    const uint64_t call = segment(peer).gave_up.value.load();
    if (call != 0 && call <= call_)
      throw PeerError(
          text("rank ", peer, " gave up this call while rank ", rank_, " still used rank ", peer, "'s tensor"));
  }
}

void ShmGroup::raise(Flag& flag, uint64_t value) {
  flag.value.store(value);
  wake_others();
}

void ShmGroup::await(Flag RankSegment::*flag, uint64_t value, Deadline deadline) {
  for (int step = 1; step < size(); ++step) {
    int peer = (rank_ + step) % size();
    const auto& peer_value = (segment(peer).*flag).value;
    waiter_.until([&] { return peer_value.load() >= value; }, peer, deadline);
  }
}

void ShmGroup::wake_others() {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_) Waiter::wake(segment(peer));
}

namespace {

/// One attempt to map the memory of all ranks, with one kind of shared memory.
class Attempt {
 public:
  Attempt(const BackendContext& context, SharedMemory::Kind kind)
      : context_(context), kind_(kind), key_prefix_(kind == SharedMemory::Kind::kUnnamed ? "unnamed/" : "named/") {}

  /// Collective. Returns null on all ranks, with the reason in `failure`, when some rank cannot create its memory or
  /// map another rank's. After an exception the segment is not freed: another rank may have mapped all segments and use
  /// it.
  std::unique_ptr<ShmGroup> make(std::string& failure) {
    RankSegment* own_segment = nullptr;
    std::string own_error;
    try {
      arena_ = kind_ == SharedMemory::Kind::kUnnamed ? Arena::of_process() : make_shared_owned<Arena>(kind_);
      own_segment = make_segment();
    } catch (const SystemError& error) {
      own_error = error.what();
    }
    const auto offers = context_.store->all_gather(key_prefix_ + "segment", context_.rank, context_.size,
                                                   own_segment ? offer(*own_segment) : "", context_.timeout);
    std::vector<ShmGroup::Member> members(context_.size);
    for (int rank = 0; rank < context_.size && own_error.empty(); ++rank)
      own_error =
          rank == context_.rank ? (members[rank] = member(*own_segment), "") : find(offers[rank], members[rank]);
    failure = agree(context_, key_prefix_ + "sees", own_error);
    if (own_segment) arena_->memory().unlink();
    if (failure.empty()) return std::make_unique<ShmGroup>(context_.rank, std::move(members), arena_);
    if (own_segment) arena_->free(reinterpret_cast<char*>(own_segment));
    return nullptr;
  }

 private:
  // Populates the pages: writing to a page that /dev/shm has no room for would raise a signal.
  RankSegment* make_segment() const {
    char* block = arena_->reserve(sizeof(RankSegment));
    arena_->memory().populate(arena_->offset_of(block).value(), sizeof(RankSegment));
    RankSegment* segment = new (block) RankSegment;
    std::random_device random;
    for (char& byte : segment->token) byte = static_cast<char>(random());
    CPU_ZERO(&segment->cores);
    ::sched_getaffinity(0, sizeof(segment->cores), &segment->cores);
    return segment;
  }

  ShmGroup::Member member(RankSegment& segment) const {
    return {SharedMemory::open(arena_->memory().handle()), &segment};
  }

  std::string offer(const RankSegment& segment) const {
    const MemoryHandle& address = arena_->memory().handle();
    return pack({address.path,
                 address.id,
                 std::to_string(address.bytes),
                 address.is_locked ? "locked" : "",
                 std::to_string(arena_->offset_of(&segment).value()),
                 {segment.token.data(), segment.token.size()}});
  }

  // Maps the segment that a rank offers. Returns an empty string, or why the segment cannot be mapped.
  static std::string find(const std::string& offered, ShmGroup::Member& member) {
    if (offered.empty()) return {};  // that rank reports why it has no memory
    try {
      const auto offer = unpack(offered);
      MemoryHandle address{offer.at(0), offer.at(1), static_cast<size_t>(to_number(offer.at(2))), !offer.at(3).empty()};
      member.memory = SharedMemory::open(address);
      member.segment = reinterpret_cast<RankSegment*>(member.memory->begin() + to_number(offer.at(4)));
      const std::string& token = offer.at(5);
      bool is_same_memory =
          std::equal(token.begin(), token.end(), member.segment->token.begin(), member.segment->token.end());
      return is_same_memory ? "" : text(offer.at(0), " is the memory of another process");
    } catch (const Error& error) {
      return error.what();
    }
  }

  const BackendContext& context_;
  const SharedMemory::Kind kind_;
  const std::string key_prefix_;
  std::shared_ptr<Arena> arena_;
};

}  // namespace

std::unique_ptr<ShmGroup> exchange_handles(const BackendContext& context) {
  if (!context.one_host)
    throw UsageError(
        "backend 'shm' needs all ranks on one host, but these ranks are on several hosts; use 'hierarchical' or "
        "'gloo'");
  if (context.size > kMaxRanks)
    throw UsageError(text("backend 'shm' supports up to ", kMaxRanks, " ranks, but this group has ", context.size));
  std::string unseen, unnamed;
  if (auto group = Attempt(context, SharedMemory::Kind::kUnnamed).make(unseen)) return group;
  log_info(text("shm: ", unseen, "; trying named shared memory"));
  if (auto group = Attempt(context, SharedMemory::Kind::kNamed).make(unnamed)) return group;
  if (unnamed != unseen) unseen += "; " + unnamed;
  throw NoSharedMemory(text("the ranks are on one host but cannot share memory (", unseen,
                            "). If they run in different containers, share the PID namespace and /dev/shm between the "
                            "containers, or use backend 'gloo'"));
}

}  // namespace lockstep::shm
