#include "backends/shm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace lockstep::shm {
namespace {

char* data_of(Letter& letter) {
  return reinterpret_cast<char*>(&letter + 1);
}

}  // namespace

/// A message that the other rank is to fetch.
class Mail::Sending final : public Transfer {
 public:
  Sending(Mail& mail, int to, std::shared_ptr<Outgoing> outgoing)
      : mail_(mail), to_(to), outgoing_(std::move(outgoing)) {}

  void wait(Deadline deadline) override {
    mail_.circle_.waiting().until([this] { return is_done(); }, to_, deadline);
  }

  bool is_done() override {
    std::lock_guard lock(mail_.mutex_);
    return !outgoing_->letter || outgoing_->letter->is_taken;
  }

 private:
  Mail& mail_;
  const int to_;
  const std::shared_ptr<Outgoing> outgoing_;
};

/// A message that this rank is to fetch.
class Mail::Receiving final : public Transfer {
 public:
  Receiving(Mail& mail, void* data, int from, uint64_t fingerprint)
      : data(data), from(from), fingerprint(fingerprint), mail_(mail) {
    std::lock_guard lock(mail_.mutex_);
    mail_.pending_.push_back(this);
  }
  ~Receiving() override {
    std::lock_guard lock(mail_.mutex_);
    mail_.pending_.remove(this);
  }

  void wait(Deadline deadline) override {
    mail_.circle_.waiting().until([this] { return is_done(); }, from, deadline);
  }

  bool is_done() override {
    std::lock_guard lock(mail_.mutex_);
    return fetch();
  }

  /// With the mail's mutex held.
  bool fetch() {
    if (!is_done_) is_done_ = mail_.fetch(*this);
    return is_done_;
  }

  void* const data;
  const int from;
  const uint64_t fingerprint;

 private:
  Mail& mail_;
  bool is_done_ = false;  // guarded by the mail's mutex
};

Mail::Mail(Circle& circle) : circle_(circle), sent_(circle.size()), arrived_(circle.size()), last_seen_(circle.size()) {
  circle_.waiting().meanwhile([this] { fetch_what_is_there(); });
}

Mail::~Mail() {
  for (auto& letters : sent_)
    for (const auto& outgoing : letters) circle_.leave_behind(reinterpret_cast<char*>(outgoing->letter));
}

std::unique_ptr<Transfer> Mail::send(const at::Tensor& data, int to, uint64_t fingerprint) {
  size_t bytes = data.nbytes();
  auto* letter = new (circle_.arena()->allocate(sizeof(Letter) + bytes)) Letter;
  letter->fingerprint = fingerprint;
  letter->bytes = bytes;
  std::memcpy(data_of(*letter), data.data_ptr(), bytes);
  uint64_t place = circle_.arena()->offset_of(letter).value();
  auto outgoing = std::make_shared<Outgoing>(Outgoing{letter});
  {
    std::lock_guard lock(mutex_);
    discard_fetched(to);
    auto& last = sent_[to].empty() ? circle_.desk(circle_.rank()).first_letters[to] : sent_[to].back()->letter->next;
    last.store(place);
    sent_[to].push_back(outgoing);
  }
  Waiting::ring(circle_.desk(to));
  return std::make_unique<Sending>(*this, to, outgoing);
}

// The receiver needs the last letter to find the next.
void Mail::discard_fetched(int to) {
  auto& letters = sent_[to];
  while (letters.size() > 1 && letters.front()->letter->is_taken && letters.front()->letter->is_passed) {
    circle_.arena()->free(reinterpret_cast<char*>(letters.front()->letter));
    letters.front()->letter = nullptr;
    letters.pop_front();
  }
}

std::unique_ptr<Transfer> Mail::receive(const at::Tensor& data, int from, uint64_t fingerprint) {
  return std::make_unique<Receiving>(*this, data.data_ptr(), from, fingerprint);
}

void Mail::fetch_what_is_there() {
  std::lock_guard lock(mutex_);
  for (Receiving* receiving : pending_) receiving->fetch();
}

bool Mail::fetch(const Receiving& receiving) {
  look(receiving.from);
  auto& letters = arrived_[receiving.from];
  auto found = std::find_if(letters.begin(), letters.end(),
                            [&](const Letter* letter) { return letter->fingerprint == receiving.fingerprint; });
  if (found == letters.end()) return false;
  Letter& letter = **found;
  std::memcpy(receiving.data, data_of(letter), letter.bytes);  // fingerprints are equal only where sizes are
  letter.is_taken = true;
  letters.erase(found);
  Waiting::ring(circle_.desk(receiving.from));
  return true;
}

// Follows the chain of letters to its end.
void Mail::look(int from) {
  for (;;) {
    Letter* last = last_seen_[from];
    uint64_t place = last ? last->next.load() : circle_.desk(from).first_letters[circle_.rank()].load();
    if (place == 0) return;
    auto* letter = reinterpret_cast<Letter*>(circle_.at(from, place));
    arrived_[from].push_back(letter);
    last_seen_[from] = letter;
    if (last) last->is_passed = true;
  }
}

}  // namespace lockstep::shm
