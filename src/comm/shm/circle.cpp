#include "comm/shm/circle.h"

#include <cstring>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::shm {
namespace {

// Ranks that are bound have few cores each, but enough together.
Waiting::Cores count_cores(const std::vector<Circle::Member>& members) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const auto& member : members) CPU_OR(&all, &all, &member.desk->cores);
  return static_cast<int>(members.size()) <= CPU_COUNT(&all) ? Waiting::Cores::kEnough : Waiting::Cores::kTooFew;
}

}  // namespace

Circle::Circle(int rank, std::vector<Member> members, std::shared_ptr<Arena> arena)
    : rank_(rank),
      members_(std::move(members)),
      arena_(std::move(arena)),
      waiting_(desk(rank_), count_cores(members_)) {}

Circle::~Circle() {
  for (const auto& member : members_) member.desk->users.fetch_sub(1);
  Desk& mine = desk(rank_);
  left_behind_.push_back(reinterpret_cast<char*>(&mine));
  arena_->retire(std::move(left_behind_), [&mine] { return mine.users == 0; });
}

void Circle::begin_call(const CallInfo& call, uint64_t place, const void* payload, size_t payload_bytes) {
  ++call_;
  CallHeader& mine = desk(rank_).posts[call_ % 2];
  mine.fingerprint = call.fingerprint;
  mine.place = place;
  if (payload_bytes > 0) std::memcpy(mine.payload.data(), payload, payload_bytes);
  mine.call.store(call_);
  ring_others();
  for (int step = 1; step < size(); ++step) {
    int peer = (rank_ + step) % size();
    const CallHeader& theirs = post(peer);
    waiting_.until([&] { return theirs.call.load() >= call_; }, peer, call.deadline);
    if (theirs.fingerprint != call.fingerprint)
      throw MismatchError(text("rank ", peer, " makes another call than rank ", rank_));
  }
}

void Circle::end_call(Deadline deadline) {
  raise(desk(rank_).done, call_);
  await(&Desk::done, call_, deadline);
}

void Circle::raise(Flag& flag, uint64_t value) {
  flag.value.store(value);
  ring_others();
}

void Circle::await(Flag Desk::*flag, uint64_t value, Deadline deadline) {
  for (int step = 1; step < size(); ++step) {
    int peer = (rank_ + step) % size();
    const auto& theirs = (desk(peer).*flag).value;
    waiting_.until([&] { return theirs.load() >= value; }, peer, deadline);
  }
}

void Circle::ring_others() {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank_) Waiting::ring(desk(peer));
}

}  // namespace lockstep::shm
