#include <algorithm>
#include <sstream>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/text.h"
#include "comm/group/group.h"

// Receives from any rank. Not every backend has them, so the receiver first finds the sender: it subscribes to a tag,
// by a note to all ranks. From then on each rank announces its messages with that tag to the subscriber. Messages
// without a subscriber cost nothing more.

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kShortPause = std::chrono::milliseconds(1), kLongPause = std::chrono::milliseconds(100);

bool advances(Backend& backend) {
  try {
    return backend.advance_messages();
  } catch (const std::exception&) {
    return false;  // the group is broken, as its failure says
  }
}

/// What a rank sends to another.
struct Note {
  static constexpr char kSubscribe = 'S', kAnnounce = 'A';

  char kind = kSubscribe;
  uint32_t tag = 0;
  int64_t messages = 0;  // of kAnnounce: sent so far
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
    if (!any_sender_.subscribers.contains({route.to, route.tag})) return;
    if (!parts_) return;
    job = parts_->job;
    messages = messages_[route];
  }
  job->note(membership_.peers[route.to].rank, membership_.name, to_text({Note::kAnnounce, route.tag, messages}));
}

// Call it before this rank leaves: nobody can ask it later. A message without elements may still be unknown.
void Group::announce_all_sends(Job& job) {
  std::vector<std::pair<MessageRoute, int64_t>> sends;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [route, messages] : messages_)
      if (route.from == membership_.rank) sends.emplace_back(route, messages);
  }
  for (const auto& [route, messages] : sends)
    job.note(membership_.peers[route.to].rank, membership_.name, to_text({Note::kAnnounce, route.tag, messages}));
}

bool Group::on_note(int rank_in_job, const std::string& content) {
  const int rank = rank_in_group(membership_, rank_in_job);
  const auto note = to_note(content);
  if (rank == Membership::kNotAMember) return true;
  if (note.kind == Note::kSubscribe) {
    {
      std::lock_guard lock(mutex_);
      any_sender_.subscribers.emplace(rank, note.tag);
    }
    announce_send({membership_.rank, rank, note.tag});
    return true;
  }
  std::lock_guard lock(mutex_);
  auto& announced = any_sender_.announced[{rank, membership_.rank, note.tag}];
  announced = std::max(announced, note.messages);
  any_sender_.changed.notify_all();
  return true;
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

std::pair<int, CallOptions> Group::await_sender(uint32_t tag, const CallOptions& options) {
  const auto backend = this->backend();
  const auto timeout = timeout_of(options);
  const auto deadline = deadline_after(timeout);
  const auto who = text(speaker(membership_), ": recv_any: ");
  if (membership_.size == 1) throw UsageError(membership_.rank, "recv_any: this group has no other rank");
  const ActivityScope blocked(activity_.get(), Activity::Phase::kCommunication);
  WorkQueue::Lock lock(mutex_);
  if (any_sender_.subscribed_tags.insert(tag).second) {
    lock.unlock();
    {
      const auto job = this->job();
      for (int rank = 0; rank < membership_.size; ++rank)
        if (rank != membership_.rank)
          job->note(membership_.peers[rank].rank, membership_.name, to_text({Note::kSubscribe, tag}));
    }
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
  // Other messages must make progress, because their senders may send to this rank afterwards.
  bool is_timely = false;
  for (auto now = Clock::now(); !is_timely && now < deadline; now = Clock::now()) {
    lock.unlock();
    const auto pause = advances(*backend) ? kShortPause : kLongPause;
    lock.lock();
    is_timely = any_sender_.changed.wait_until(lock, std::min(deadline, now + pause), is_over);
  }
  recorder_->change(record.ticket, sender ? CallRecord::State::kDone : CallRecord::State::kFailed);
  if (sender) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    return {*sender, {std::max(left, std::chrono::milliseconds(1)), options.site}};
  }
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
