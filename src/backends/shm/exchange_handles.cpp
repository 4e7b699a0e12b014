#include "backends/shm/exchange_handles.h"

#include <algorithm>
#include <new>
#include <random>

#include "base/log.h"
#include "base/text.h"
#include "backends/common/agree.h"
#include "backends/shm/shm_backend.h"
#include "rendezvous/store/protocol.h"

namespace lockstep::shm {
namespace {

/// One attempt to see each other, by memory that is found in one way.
class Attempt {
 public:
  Attempt(const BackendContext& context, SharedMemory::Way way)
      : context_(context),
        way_(way == SharedMemory::Way::kUnnamed ? "unnamed/" : "named/"),
        arena_(way == SharedMemory::Way::kUnnamed ? Arena::of_process() : make_shared_owned<Arena>(way)) {}

  /// None, with the reason in `failure`, when some rank cannot see another: on all ranks alike.
  std::unique_ptr<Circle> make(std::string& failure) {
    Desk* mine = make_desk();
    try {
      return make(*mine, failure);
    } catch (...) {
      arena_->memory().unlink();  // the desk stays: another rank may have seen all of them
      throw;
    }
  }

 private:
  std::unique_ptr<Circle> make(Desk& mine, std::string& failure) {
    context_.store->set(text(way_, "desk/", context_.rank), offer(mine));
    std::vector<Circle::Member> members(context_.size);
    std::string trouble;
    for (int rank = 0; rank < context_.size && trouble.empty(); ++rank)
      trouble = rank == context_.rank ? (members[rank] = member(mine), "") : find(rank, members[rank]);
    failure = agree(context_, way_ + "sees", trouble);
    arena_->memory().unlink();
    if (failure.empty()) return std::make_unique<Circle>(context_.rank, std::move(members), arena_);
    arena_->free(reinterpret_cast<char*>(&mine));
    return nullptr;
  }

  Desk* make_desk() const {
    Desk* desk = new (arena_->reserve(sizeof(Desk))) Desk;
    std::random_device random;
    for (char& byte : desk->token) byte = static_cast<char>(random());
    CPU_ZERO(&desk->cores);
    ::sched_getaffinity(0, sizeof(desk->cores), &desk->cores);
    return desk;
  }

  Circle::Member member(Desk& mine) const { return {SharedMemory::open(arena_->memory().address()), &mine}; }

  std::string offer(const Desk& desk) const {
    const Address& address = arena_->memory().address();
    return pack({address.path,
                 address.id,
                 std::to_string(address.bytes),
                 address.is_locked ? "locked" : "",
                 std::to_string(arena_->offset_of(&desk).value()),
                 {desk.token.data(), desk.token.size()}});
  }

  // Returns why the desk of the rank cannot be seen, or nothing.
  std::string find(int rank, Circle::Member& member) const {
    auto offer = unpack(context_.store->get(text(way_, "desk/", rank), context_.timeout));
    try {
      Address address{offer.at(0), offer.at(1), static_cast<size_t>(to_number(offer.at(2))), !offer.at(3).empty()};
      member.memory = SharedMemory::open(address);
      member.desk = reinterpret_cast<Desk*>(member.memory->begin() + to_number(offer.at(4)));
      const std::string& token = offer.at(5);
      bool is_it = std::equal(token.begin(), token.end(), member.desk->token.begin(), member.desk->token.end());
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

std::unique_ptr<Circle> introduce(const BackendContext& context) {
  if (!context.one_host)
    throw UsageError("backend 'shm' joins ranks of one host, and these are on several; use 'hierarchical' or 'gloo'");
  if (context.size > kMostRanks)
    throw UsageError(text("backend 'shm' joins up to ", kMostRanks, " ranks, and these are ", context.size));
  std::string unseen, unnamed;
  if (auto circle = Attempt(context, SharedMemory::Way::kUnnamed).make(unseen)) return circle;
  log_info(text("shm: ", unseen, "; trying named shared memory"));
  if (auto circle = Attempt(context, SharedMemory::Way::kNamed).make(unnamed)) return circle;
  throw NoSharedMemory(text("the ranks are on one host, but do not see each other's memory (", unseen, "; ", unnamed,
                            "): they run in different containers, or as different users; let the containers share "
                            "processes and /dev/shm, or use backend 'gloo'"));
}

}  // namespace lockstep::shm
