#include <algorithm>
#include <sstream>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/text.h"
#include "comm/group/group.h"

// Receives from any rank. No backend has them for all its messages, so the receiver finds the sender first: it tells
// all ranks, through the store, that it follows a tag. From then on they tell it of each message that they send to it
// with this tag. Sends that nobody follows cost nothing more.

namespace lockstep::detail {
namespace {

/// What ranks tell each other.
struct Note {
  static constexpr char kFollow = 'F', kSent = 'S';

  char kind = kFollow;
  uint32_t tag = 0;
  int64_t messages = 0;  // of kSent: so far
};

std::string to_text(const Note& note) {
  return text(note.kind, ' ', note.tag, ' ', note.messages);
}

Note to_note(const std::string& content) {
  Note note;
  std::istringstream in(content);
  if (!(in >> note.kind >> note.tag >> note.messages)) throw ProtocolError("malformed note of a rank");
  return note;
}

}  // namespace

void Group::announce_send(const MessageRoute& route) {
  std::shared_ptr<Job> job;
  int64_t messages = 0;
  {
    std::lock_guard lock(mutex_);
    if (!any_sender_.followers.contains({route.to, route.tag})) return;
    if (!parts_) return;
    job = parts_->job;
    messages = messages_[route];
  }
  job->note(membership_.peers[route.to].rank, membership_.name, to_text({Note::kSent, route.tag, messages}));
}

void Group::on_note(int rank_in_job, const std::string& content) {
  const int rank = rank_in_group(membership_, rank_in_job);
  const auto note = to_note(content);
  if (rank == Membership::kNotAMember) return;
  if (note.kind == Note::kFollow) {
    {
      std::lock_guard lock(mutex_);
      any_sender_.followers.emplace(rank, note.tag);
    }
    return announce_send({membership_.rank, rank, note.tag});
  }
  std::lock_guard lock(mutex_);
  auto& announced = any_sender_.announced[{rank, membership_.rank, note.tag}];
  announced = std::max(announced, note.messages);
  any_sender_.changed.notify_all();
}

// Requires the mutex. Begins with the rank after the last one, so that no sender starves.
std::optional<int> Group::waiting_sender(uint32_t tag) {
  for (int step = 1; step <= membership_.size; ++step) {
    const int rank = (any_sender_.last + step) % membership_.size;
    const MessageRoute route{rank, membership_.rank, tag};
    if (const auto found = any_sender_.announced.find(route);
        found != any_sender_.announced.end() && found->second > messages_[route])
      return any_sender_.last = rank;
  }
  return std::nullopt;
}

int Group::await_sender(uint32_t tag, const CallOptions& options) {
  check_process();
  const auto job = this->job();
  const auto timeout = timeout_of(options);
  const auto deadline = deadline_after(timeout);
  const auto who = text(speaker(membership_), ": recv_any: ");
  if (membership_.size == 1) throw UsageError(membership_.rank, "recv_any: this group has no other rank");
  WorkQueue::Lock lock(mutex_);
  if (any_sender_.followed.insert(tag).second) {
    lock.unlock();
    for (int rank = 0; rank < membership_.size; ++rank)
      if (rank != membership_.rank)
        job->note(membership_.peers[rank].rank, membership_.name, to_text({Note::kFollow, tag}));
    lock.lock();
  }
  CallRecord record{0,
                    membership_.name,
                    {++aside_[Operation::kRecvAny], {}, Operation::kRecvAny},
                    {Operation::kRecvAny},
                    options.site};
  record.ticket = recorder_->begin(record);
  std::optional<int> sender;
  const auto is_over = [&] {
    return (sender = waiting_sender(tag)) || failure_ || !parts_ ||
           static_cast<int>(left_.size()) == membership_.size - 1;
  };
  const bool is_timely = any_sender_.changed.wait_until(lock, deadline, is_over);
  recorder_->change(record.ticket, sender ? CallRecord::State::kDone : CallRecord::State::kFailed);
  if (sender) return *sender;
  const auto failure = failure_;
  const bool is_destroyed = !parts_;
  lock.unlock();
  if (failure)
    rethrow_with_prefix(failure, text(who, "the group is broken: "), flight_recorder_suffix(failure), membership_.rank);
  if (is_destroyed) refuse_destroyed();
  if (is_timely)
    throw PeerError(text(who, "all other ranks have left the group, so that no message with tag ", tag, " will arrive"),
                    membership_.rank, {});
  throw TimeoutError(text(who, "no rank has sent a message with tag ", tag, " within ", timeout.count(),
                          " ms; the group stays usable"),
                     membership_.rank, {});
}

}  // namespace lockstep::detail
