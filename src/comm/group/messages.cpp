#include "comm/group/messages.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include <lockstep/error.h>

#include "base/text.h"

// Overview: receives from any rank. Not every backend has them, so the receiver first finds the sender: it subscribes
// to a tag, by a note to all ranks. From then on each rank announces its messages with that tag to the subscriber.
// Messages without a subscriber cost nothing more.

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kShortPause = std::chrono::milliseconds(1), kLongPause = std::chrono::milliseconds(100);

bool advances(Backend& backend) {
  try {
    return backend.advance_messages();
  } catch (const std::exception&) {
    return false;  // the group is broken: its failure has the reason
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

// A rank that subscribes after the first look gets its announcement from on_note().
void Messages::announce(const MessageRoute& route) {
  if (!has_subscribers_) return;
  int64_t messages = 0;
  {
    std::lock_guard lock(mutex_);
    if (!subscribers_.contains({route.to, route.tag})) return;
    messages = counts_[route];
  }
  if (const auto parts = connection_.parts_if_any())
    parts->job->note(me_.peers[route.to].rank, me_.name, to_text({Note::kAnnounce, route.tag, messages}));
}

// Also to receivers that have not subscribed: a message without elements may still be unknown to its receiver.
void Messages::announce_all(Job& job) {
  std::vector<std::pair<MessageRoute, int64_t>> sends;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [route, messages] : counts_)
      if (route.from == me_.rank) sends.emplace_back(route, messages);
  }
  for (const auto& [route, messages] : sends)
    job.note(me_.peers[route.to].rank, me_.name, to_text({Note::kAnnounce, route.tag, messages}));
}

void Messages::subscribe_to(uint32_t tag) {
  {
    std::lock_guard lock(mutex_);
    if (!subscribed_tags_.insert(tag).second) return;
  }
  const auto job = connection_.parts()->job;
  for (int rank = 0; rank < me_.size; ++rank)
    if (rank != me_.rank) job->note(me_.peers[rank].rank, me_.name, to_text({Note::kSubscribe, tag}));
}

bool Messages::on_note(int rank_in_job, const std::string& content) {
  const int rank = rank_in_group(me_, rank_in_job);
  const auto note = to_note(content);
  if (rank == Membership::kNotAMember) return true;
  if (note.kind == Note::kSubscribe) {
    {
      std::lock_guard lock(mutex_);
      subscribers_.emplace(rank, note.tag);
      has_subscribers_ = true;
    }
    announce({me_.rank, rank, note.tag});
    return true;
  }
  std::lock_guard lock(mutex_);
  auto& announced = announced_[{rank, me_.rank, note.tag}];
  announced = std::max(announced, note.messages);
  announced_more_.notify_all();
  return true;
}

// Requires the mutex. Begins with the rank after the last one, so that no sender starves.
std::optional<int> Messages::waiting_sender(uint32_t tag) {
  for (int step = 1; step <= me_.size; ++step) {
    const int rank = (last_ + step) % me_.size;
    const MessageRoute route{rank, me_.rank, tag};
    if (const auto found = announced_.find(route); found != announced_.end() && found->second > counts_[route])
      return last_ = rank;
  }
  return std::nullopt;
}

// Other messages must make progress, because their senders may send to this rank afterwards.
std::optional<int> Messages::await_sender(WorkQueue::Lock& lock, uint32_t tag, Deadline deadline,
                                          const std::function<bool()>& should_stop) {
  std::optional<int> sender;
  const auto is_over = [&] { return (sender = waiting_sender(tag)) || should_stop(); };
  for (auto now = Clock::now(); now < deadline; now = Clock::now()) {
    lock.unlock();
    const auto parts = connection_.parts_if_any();
    const auto pause = parts && advances(*parts->backend) ? kShortPause : kLongPause;
    lock.lock();
    if (announced_more_.wait_until(lock, std::min(deadline, now + pause), is_over)) break;
  }
  return sender;
}

}  // namespace lockstep::detail
