#include "backends/shm/exchange_handles.h"

#include <algorithm>
#include <new>
#include <random>

#include "backends/common/agree.h"
#include "backends/shm/shm_backend.h"
#include "base/log.h"
#include "base/text.h"
#include "rendezvous/store/protocol.h"

namespace lockstep::shm {
namespace {

/// One attempt to see each other, by memory that is found in one way.
class Attempt {
 public:
  Attempt(const BackendContext& context, SharedMemory::Kind way)
      : context_(context),
        way_(way == SharedMemory::Kind::kUnnamed ? "unnamed/" : "named/"),
        arena_(way == SharedMemory::Kind::kUnnamed ? Arena::of_process() : make_shared_owned<Arena>(way)) {}

  /// None, with the reason in `failure`, when some rank cannot see another: on all ranks alike.
  std::unique_ptr<ShmGroup> make(std::string& failure) {
    RankSegment* mine = make_desk();
    try {
      return make(*mine, failure);
    } catch (...) {
      arena_->memory().unlink();  // the segment stays: another rank may have seen all of them
      throw;
    }
  }

 private:
  std::unique_ptr<ShmGroup> make(RankSegment& mine, std::string& failure) {
    context_.store->set(text(way_, "segment/", context_.rank), offer(mine));
    std::vector<ShmGroup::Member> members(context_.size);
    std::string trouble;
    for (int rank = 0; rank < context_.size && trouble.empty(); ++rank)
      trouble = rank == context_.rank ? (members[rank] = member(mine), "") : find(rank, members[rank]);
    failure = agree(context_, way_ + "sees", trouble);
    arena_->memory().unlink();
    if (failure.empty()) return std::make_unique<ShmGroup>(context_.rank, std::move(members), arena_);
    arena_->free(reinterpret_cast<char*>(&mine));
    return nullptr;
  }

  RankSegment* make_desk() const {
    RankSegment* segment = new (arena_->reserve(sizeof(RankSegment))) RankSegment;
    std::random_device random;
    for (char& byte : segment->token) byte = static_cast<char>(random());
    CPU_ZERO(&segment->cores);
    ::sched_getaffinity(0, sizeof(segment->cores), &segment->cores);
    return segment;
  }

  ShmGroup::Member member(RankSegment& mine) const { return {SharedMemory::open(arena_->memory().handle()), &mine}; }

  std::string offer(const RankSegment& segment) const {
    const MemoryHandle& address = arena_->memory().handle();
    return pack({address.path,
                 address.id,
                 std::to_string(address.bytes),
                 address.is_locked ? "locked" : "",
                 std::to_string(arena_->offset_of(&segment).value()),
                 {segment.token.data(), segment.token.size()}});
  }

  // Returns why the segment of the rank cannot be seen, or nothing.
  std::string find(int rank, ShmGroup::Member& member) const {
    auto offer = unpack(context_.store->get(text(way_, "segment/", rank), context_.timeout));
    try {
      MemoryHandle address{offer.at(0), offer.at(1), static_cast<size_t>(to_number(offer.at(2))), !offer.at(3).empty()};
      member.memory = SharedMemory::open(address);
      member.segment = reinterpret_cast<RankSegment*>(member.memory->begin() + to_number(offer.at(4)));
      const std::string& token = offer.at(5);
      bool is_it = std::equal(token.begin(), token.end(), member.segment->token.begin(), member.segment->token.end());
      return is_it ? "" : text(offer.at(0), " is the memory of another process");
    } catch (const Error& error) {
      return error.what();
    }
  }

  const BackendContext& context_;
  const std::string way_;
  const std::shared_ptr<Arena> arena_;
};

}  // namespace

std::unique_ptr<ShmGroup> exchange_handles(const BackendContext& context) {
  if (!context.one_host)
    throw UsageError("backend 'shm' joins ranks of one host, and these are on several; use 'hierarchical' or 'gloo'");
  if (context.size > kMostRanks)
    throw UsageError(text("backend 'shm' joins up to ", kMostRanks, " ranks, and these are ", context.size));
  std::string unseen, unnamed;
  if (auto group = Attempt(context, SharedMemory::Kind::kUnnamed).make(unseen)) return group;
  log_info(text("shm: ", unseen, "; trying named shared memory"));
  if (auto group = Attempt(context, SharedMemory::Kind::kNamed).make(unnamed)) return group;
  throw NoSharedMemory(text("the ranks are on one host, but do not see each other's memory (", unseen, "; ", unnamed,
                            "): they run in different containers, or as different users; let the containers share "
                            "processes and /dev/shm, or use backend 'gloo'"));
}

}  // namespace lockstep::shm
