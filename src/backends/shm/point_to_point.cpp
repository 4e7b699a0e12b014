#include "backends/shm/point_to_point.h"

#include <cstring>
#include <new>

namespace lockstep::shm {
namespace {

char* data_of(ShmMessage& message) {
  return reinterpret_cast<char*>(&message + 1);
}

}  // namespace

/// A message that the other rank fetches.
class PointToPoint::Sending final : public Transfer {
 public:
  Sending(PointToPoint& point_to_point, int to, std::shared_ptr<Outgoing> outgoing)
      : point_to_point_(point_to_point), to_(to), outgoing_(std::move(outgoing)) {}

  void wait(Deadline deadline) override {
    point_to_point_.group_.waiter().until([this] { return is_done(); }, to_, deadline);
  }

  bool is_done() override {
    std::lock_guard lock(point_to_point_.mutex_);
    return !outgoing_->message || outgoing_->message->is_taken;
  }

 private:
  PointToPoint& point_to_point_;
  const int to_;
  const std::shared_ptr<Outgoing> outgoing_;
};

/// A message that this rank fetches.
class PointToPoint::Receiving final : public Transfer {
 public:
  Receiving(PointToPoint& point_to_point, void* data, int from, uint64_t fingerprint)
      : data_(data), from_(from), fingerprint_(fingerprint), point_to_point_(point_to_point) {
    std::lock_guard lock(point_to_point_.mutex_);
    auto& waiting = queue();
    place_ = waiting.insert(waiting.end(), this);
    point_to_point_.match(from_, fingerprint_);
  }
  ~Receiving() override {
    std::lock_guard lock(point_to_point_.mutex_);
    if (is_done_) return;
    auto& waiting = queue();
    waiting.erase(place_);
    if (waiting.empty()) point_to_point_.inboxes_[from_].waiting.erase(fingerprint_);
  }

  void wait(Deadline deadline) override {
    point_to_point_.group_.waiter().until([this] { return is_done(); }, from_, deadline);
  }

  bool is_done() override {
    std::lock_guard lock(point_to_point_.mutex_);
    if (!is_done_) point_to_point_.follow_messages(from_);
    return is_done_;
  }

  /// Copies the data. Requires the mutex of the PointToPoint. The caller removes this object from its queue.
  void fetch(ShmMessage& message) {
    std::memcpy(data_, data_of(message), message.bytes);  // equal fingerprints imply equal sizes
    message.is_taken = true;
    is_done_ = true;
  }

 private:
  std::list<Receiving*>& queue() { return point_to_point_.inboxes_[from_].waiting[fingerprint_]; }

  void* const data_;
  const int from_;
  const uint64_t fingerprint_;
  PointToPoint& point_to_point_;
  std::list<Receiving*>::iterator place_;  // guarded by point_to_point_.mutex_; valid until is_done_
  bool is_done_ = false;                   // guarded by point_to_point_.mutex_
};

PointToPoint::PointToPoint(ShmGroup& group) : group_(group), sent_(group.size()), inboxes_(group.size()) {
  group_.waiter().set_background_work([this] { receive_arrived(); });
}

PointToPoint::~PointToPoint() {
  for (auto& messages : sent_)
    for (const auto& outgoing : messages) group_.free_when_all_left(reinterpret_cast<char*>(outgoing->message));
}

std::unique_ptr<Transfer> PointToPoint::send(const at::Tensor& data, int to, uint64_t fingerprint) {
  size_t bytes = data.nbytes();
  auto* message = new (group_.arena()->allocate(sizeof(ShmMessage) + bytes)) ShmMessage;
  message->fingerprint = fingerprint;
  message->bytes = bytes;
  std::memcpy(data_of(*message), data.data_ptr(), bytes);
  uint64_t offset = group_.arena()->offset_of(message).value();
  auto outgoing = std::make_shared<Outgoing>(Outgoing{message});
  {
    std::lock_guard lock(mutex_);
    discard_fetched(to);
    auto& last = sent_[to].empty() ? group_.segment(group_.rank()).first_messages[to] : sent_[to].back()->message->next;
    last.store(offset);
    sent_[to].push_back(outgoing);
  }
  Waiter::wake(group_.segment(to));
  return std::make_unique<Sending>(*this, to, outgoing);
}

// Keeps the last message: the receiver finds the next message through its `next` field.
void PointToPoint::discard_fetched(int to) {
  auto& messages = sent_[to];
  while (messages.size() > 1 && messages.front()->message->is_taken && messages.front()->message->is_passed) {
    group_.arena()->free(reinterpret_cast<char*>(messages.front()->message));
    messages.front()->message = nullptr;
    messages.pop_front();
  }
}

std::unique_ptr<Transfer> PointToPoint::receive(const at::Tensor& data, int from, uint64_t fingerprint) {
  return std::make_unique<Receiving>(*this, data.data_ptr(), from, fingerprint);
}

bool PointToPoint::receive_arrived() {
  std::lock_guard lock(mutex_);
  bool some_wait = false;
  for (int from = 0; from < group_.size(); ++from) {
    if (!inboxes_[from].waiting.empty()) follow_messages(from);
    some_wait = some_wait || !inboxes_[from].waiting.empty();
  }
  return some_wait;
}

// Follows the linked list of messages from that rank to its end.
void PointToPoint::follow_messages(int from) {
  auto& inbox = inboxes_[from];
  for (;;) {
    ShmMessage* last = inbox.last_seen;
    uint64_t offset = last ? last->next.load() : group_.segment(from).first_messages[group_.rank()].load();
    if (offset == 0) return;
    auto* message = reinterpret_cast<ShmMessage*>(group_.at(from, offset));
    const uint64_t fingerprint = message->fingerprint;
    inbox.arrived[fingerprint].push_back(message);
    inbox.last_seen = message;
    if (last) last->is_passed = true;
    match(from, fingerprint);
  }
}

// Looks nothing up in the lists of messages, which may be long: a program may post thousands of receives first.
void PointToPoint::match(int from, uint64_t fingerprint) {
  auto& [arrived, waiting, last_seen] = inboxes_[from];
  const auto messages = arrived.find(fingerprint);
  const auto receives = waiting.find(fingerprint);
  if (messages == arrived.end() || receives == waiting.end()) return;
  while (!messages->second.empty() && !receives->second.empty()) {
    receives->second.front()->fetch(*messages->second.front());
    receives->second.pop_front();
    messages->second.pop_front();
    Waiter::wake(group_.segment(from));
  }
  if (messages->second.empty()) arrived.erase(messages);
  if (receives->second.empty()) waiting.erase(receives);
}

}  // namespace lockstep::shm
