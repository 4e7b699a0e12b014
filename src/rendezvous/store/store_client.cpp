#include "rendezvous/store/store_client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <lockstep/error.h>

#include "base/start_thread.h"
#include "base/text.h"
#include "rendezvous/store/store_server.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr auto kBeat = std::chrono::milliseconds(250);  // the maximum age of the activity that other ranks see
constexpr auto kFarewell = std::chrono::milliseconds(500);
constexpr auto kStall = std::chrono::seconds(1);       // a longer gap between iterations: this process was stopped
constexpr auto kHandshake = std::chrono::seconds(10);  // limit of one attempt

std::chrono::milliseconds time_left(Clock::time_point until) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
  return std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(0), std::chrono::hours(1));
}

}  // namespace

StoreClient::StoreClient(const Options& options)
    : options_(options),
      tls_(TlsContext::Side::kClient, key_identity(options.generation), options.key),
      heartbeats_(std::min<std::chrono::milliseconds>(options.heartbeat_limit / 10, kBeat)),
      waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!waker_.is_open()) throw SystemError(text("eventfd: ", std::strerror(errno)));
  connect();
  last_heard_ = Clock::now();
  thread_ = start_thread("the connection to the job's store", [this] { run(); });
}

StoreClient::~StoreClient() {
  if (!owner_.is_this()) {  // a forked child has no thread to join or detach, and the parent uses the connection
    abandon(new std::thread(std::move(thread_)));
    return;
  }
  stop_listening();
  {
    Lock lock(mutex_);
    if (!is_over_) {
      lock.unlock();
      leave_job(std::nullopt);
      lock.lock();
    }
    changed_.wait_for(lock, kFarewell, [&] { return broken_ != nullptr; });
    is_stopping_ = true;
    changed_.notify_all();
  }
  wake();
  thread_.join();
}

// --- connecting

// A store that has too many unauthenticated connections, is starting up, or is shutting down drops the connection; then
// retry. A store that answers but does not accept the key will not accept it later either.
void StoreClient::connect() {
  std::string reason;
  auto pause = kFirstPause;
  do {
    try {
      socket_ = connect_to(options_.endpoint, options_.deadline, options_.on_wait);
    } catch (const TimeoutError&) {
      if (reason.empty()) throw;
      break;
    }
    session_ = std::make_unique<TlsSession>(tls_);
    decoder_ = {};
    unsent_ = {};
    try {
      if (handshake(std::min(options_.deadline, Clock::now() + kHandshake), reason)) {
        local_address_ = lockstep::local_address(socket_);
        closed_in_children_.emplace(socket_.get());
        return;
      }
    } catch (const std::runtime_error& error) {  // TlsError or ProtocolError
      throw PeerError(text("the store at ", to_string(options_.endpoint),
                           " and this process do not have the same secret, or no lockstep store listens there (",
                           error.what(),
                           "). Check that no other job uses this port and that LOCKSTEP_SECRET_FILE is the same on all "
                           "ranks"));
    }
    std::this_thread::sleep_until(std::min(Clock::now() + pause, options_.deadline));
    pause = std::min(pause * 2, kMaxPause);
  } while (Clock::now() < options_.deadline);
  throw TimeoutError(text("the store at ", to_string(options_.endpoint), " did not accept this process: ", reason));
}

bool StoreClient::handshake(Deadline deadline, std::string& reason) {
  for (;;) {
    unsent_.append(session_->take_output());
    flush_locked();
    pollfd ready{socket_.get(), static_cast<short>(unsent_.empty() ? POLLIN : POLLIN | POLLOUT), 0};
    auto left = time_left(deadline);
    if (left.count() == 0) {
      reason = "it did not answer";
      return false;
    }
    if (options_.on_wait) options_.on_wait();
    ::poll(&ready, 1, static_cast<int>(std::min(left, kBetweenCalls).count()));
    std::array<char, 16 << 10> bytes;
    ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got <= 0) {
      reason = got == 0 ? "it closed the connection" : std::strerror(errno);
      return false;
    }
    decoder_.feed(session_->receive({bytes.data(), static_cast<size_t>(got)}));
    auto welcome = decoder_.next();
    if (!welcome) continue;
    if (welcome->verb == Verb::kClosing) {
      reason = "it was shutting down";  // another store may start at this address
      return false;
    }
    if (welcome->verb != Verb::kWelcome || welcome->fields.size() != 5) throw TlsError("unexpected first message");
    host_role_ = welcome->fields[0];
    host_ = {welcome->fields[1], welcome->fields[2], to_number(welcome->fields[3])};
    if (!welcome->fields[4].empty())
      host_culprit_ = Culprit{static_cast<int>(to_number(welcome->fields[4])), CulpritRole::kGone};
    return true;
  }
}

std::string StoreClient::describe_host() const {
  return text(host_role_, " (", describe(host_), "), which hosts the job's store,");
}

// --- requests

std::shared_ptr<StoreClient::Pending> StoreClient::start(Verb verb, Fields fields,
                                                         std::function<void(std::optional<Fields>)> done,
                                                         uint64_t* id) {
  owner_.check("the process that connected to the store");
  auto pending = std::make_shared<Pending>();
  pending->done = std::move(done);
  Lock lock(mutex_);
  if (broken_) std::rethrow_exception(broken_);
  uint64_t request_id = next_id_++;
  if (id) *id = request_id;
  send_locked({verb, request_id, std::move(fields)});
  pending_.emplace(request_id, pending);
  return pending;
}

StoreClient::Fields StoreClient::result_of(const Pending& pending) {
  const auto& answer = pending.answer;
  auto field = [&](size_t index) { return index < answer.fields.size() ? answer.fields[index] : std::string(); };
  if (answer.verb == Verb::kRefused) throw UsageError(field(0));
  if (answer.verb == Verb::kFailed) std::rethrow_exception(to_exception(read_failure(answer.fields)));
  return answer.fields;
}

StoreClient::Fields StoreClient::call(Verb verb, Fields fields) {
  auto pending = start(verb, std::move(fields), nullptr, nullptr);
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return pending->is_done || broken_; });
  if (!pending->is_done) std::rethrow_exception(broken_);
  return result_of(*pending);
}

std::optional<StoreClient::Fields> StoreClient::call(Verb verb, Fields fields, Deadline deadline, Fields& late) {
  uint64_t id = 0;
  auto pending = start(verb, std::move(fields), nullptr, &id);
  Lock lock(mutex_);
  auto is_answered = [&] { return pending->is_done || broken_; };
  if (!changed_.wait_until(lock, deadline, is_answered)) {
    // The store answers kCancel at once with the missing keys, or has answered the request already.
    send_locked({Verb::kCancel, 0, {std::to_string(id)}});
    changed_.wait(lock, is_answered);
  }
  if (!pending->is_done) std::rethrow_exception(broken_);
  if (pending->answer.verb != Verb::kLate) return result_of(*pending);
  late = pending->answer.fields;
  return std::nullopt;
}

void StoreClient::call(Verb verb, Fields fields, std::function<void(std::optional<Fields>)> done) {
  try {
    start(verb, std::move(fields), done, nullptr);
  } catch (const Error&) {
    done(std::nullopt);
  }
}

void StoreClient::send_async(Verb verb, Fields fields) noexcept {
  if (!owner_.is_this()) return;
  try {
    Lock lock(mutex_);
    if (!broken_ && !is_over_) send_locked({verb, 0, std::move(fields)});
  } catch (const std::exception&) {
    // The connection is lost, so the notification has no receiver.
  }
}

void StoreClient::leave_job(const std::optional<Failure>& failure) noexcept {
  if (!owner_.is_this()) return;
  send_async(Verb::kLeaveJob, failure ? to_fields(*failure) : Fields{"", ""});  // no-op after the first call
  Lock lock(mutex_);
  is_over_ = true;
}

// Throws PeerError if the session has ended by an alert of the store. The thread is then about to set broken_.
void StoreClient::send_locked(const StoreMessage& message) {
  try {
    session_->send(encode(message));
  } catch (const TlsError& error) {
    std::rethrow_exception(
        to_exception({ErrorKind::kPeer, text(describe_host(), " is gone: its connection broke (", error.what(), ")"),
                      host_culprit_}));
  }
  unsent_.append(session_->take_output());
  flush_locked();
  if (!unsent_.empty()) wake();
}

// Ignores errors: read_some() detects a lost connection.
void StoreClient::flush_locked() {
  while (!unsent_.empty()) {
    ssize_t put = ::send(socket_.get(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return;
    unsent_.remove(static_cast<size_t>(put));
  }
}

// --- the thread

void StoreClient::listen(StoreListener* listener) {
  {
    std::lock_guard lock(listener_mutex_);
    listener_ = listener;
    if (over_) listener_->on_failure("", *over_);
  }
  has_new_listener_ = true;
  wake();
}

void StoreClient::stop_listening() {
  std::lock_guard listening(listener_mutex_);
  listener_ = nullptr;
  Lock lock(mutex_);
  for (auto& [id, pending] : pending_) pending->done = nullptr;
}

std::optional<Failure> StoreClient::over() {
  std::lock_guard lock(listener_mutex_);
  return over_;
}

void StoreClient::wake() {
  uint64_t one = 1;
  [[maybe_unused]] auto written = ::write(waker_.get(), &one, sizeof one);
}

void StoreClient::run() {
  auto last_iteration = Clock::now();
  for (;;) {
    if (has_new_listener_.exchange(false)) heartbeats_.make_due(Clock::now());
    bool can_read = wait_for_something(std::min<std::chrono::milliseconds>(kTick, time_left(heartbeats_.due())));
    auto now = Clock::now();
    if (now - last_iteration > kStall) last_heard_ = now;  // this process was stopped; messages may still be unread
    last_iteration = now;
    {
      Lock lock(mutex_);
      if (is_stopping_) return;
      if (broken_) {  // no more messages: wait for the destructor
        changed_.wait(lock, [&] { return is_stopping_; });
        return;
      }
    }
    if (can_read) read_some();
    beat();
    check_silence();
    std::lock_guard listening(listener_mutex_);
    if (listener_) listener_->on_tick();
  }
}

bool StoreClient::wait_for_something(std::chrono::milliseconds limit) {
  short events = POLLIN;
  {
    Lock lock(mutex_);
    if (!unsent_.empty()) events |= POLLOUT;
  }
  std::array<pollfd, 2> ready{{{socket_.get(), events, 0}, {waker_.get(), POLLIN, 0}}};
  ::poll(ready.data(), ready.size(), static_cast<int>(limit.count()));
  if (ready[1].revents & POLLIN) {
    uint64_t count = 0;
    [[maybe_unused]] auto read = ::read(waker_.get(), &count, sizeof count);
  }
  if (ready[0].revents & POLLOUT) {
    Lock lock(mutex_);
    flush_locked();
  }
  return ready[0].revents & (POLLIN | POLLHUP | POLLERR);
}

void StoreClient::read_some() {
  std::array<char, 64 << 10> bytes;
  ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got < 0)
    return fail_connection(text("is gone: its connection broke (", std::strerror(errno), ")"), false, host_culprit_);
  if (got == 0) return fail_connection("is gone: its connection was closed", false, host_culprit_);
  last_heard_ = Clock::now();
  try {
    {
      Lock lock(mutex_);
      decoder_.feed(session_->receive({bytes.data(), static_cast<size_t>(got)}));
      unsent_.append(session_->take_output());
      flush_locked();
    }
    while (auto message = decoder_.next()) handle(*message);
  } catch (const std::exception& error) {
    fail_connection(text("sent an invalid message: ", error.what()), false, host_culprit_);
  }
}

void StoreClient::handle(const StoreMessage& message) {
  auto field = [&](size_t index) -> const std::string& {
    if (index >= message.fields.size()) throw ProtocolError("the message has too few fields");
    return message.fields[index];
  };
  switch (message.verb) {
    case Verb::kHeartbeatReply:
      return;
    case Verb::kClosing:
      return fail_connection("has ended, so the job's store is closed", true, host_culprit_);
    case Verb::kNotice: {
      std::lock_guard listening(listener_mutex_);
      return notify_failure(field(0), read_failure(message.fields, 1));
    }
    case Verb::kQuestion: {
      std::lock_guard listening(listener_mutex_);
      send_async(Verb::kAnswer,
                 {std::to_string(message.id), listener_ ? listener_->on_question(field(0), field(1)) : std::string()});
      return;
    }
    case Verb::kLeft: {
      std::lock_guard listening(listener_mutex_);
      if (listener_) listener_->on_left(static_cast<int>(to_number(field(0))), field(1), to_number(field(2)));
      return;
    }
    case Verb::kNoted: {
      std::lock_guard listening(listener_mutex_);
      if (listener_) listener_->on_note(static_cast<int>(to_number(field(0))), field(1), field(2));
      return;
    }
    default:
      break;
  }
  std::lock_guard listening(listener_mutex_);
  std::shared_ptr<Pending> pending;
  {
    Lock lock(mutex_);
    auto found = pending_.extract(message.id);
    if (found.empty()) return;
    pending = found.mapped();
    pending->answer = message;
    pending->is_done = true;
    changed_.notify_all();
  }
  if (pending->done) pending->done(message.verb == Verb::kDone ? std::optional(message.fields) : std::nullopt);
}

void StoreClient::beat() {
  if (!heartbeats_.is_due(Clock::now())) return;
  std::string doing;
  {
    std::lock_guard listening(listener_mutex_);
    if (listener_) doing = listener_->doing();
  }
  send_async(Verb::kBeat, {doing, is_this_process_traced() ? "traced" : ""});
}

void StoreClient::check_silence() {
  auto silence = Clock::now() - last_heard_;
  if (silence < options_.heartbeat_limit) return;
  if (is_traced(host_)) {
    last_heard_ = Clock::now();  // after the debugger detaches, the host has the full limit again
    return;
  }
  std::string reason = text("sent no heartbeat for ", std::chrono::duration<double>(silence).count(),
                            " s: the process is stopped, or its host or network is down");
  auto silent = host_culprit_;
  if (silent) silent->role = CulpritRole::kSilent;
  // If the host resumes later, it must not conclude that this process died.
  send_async(Verb::kLeaveJob, to_fields({ErrorKind::kPeer, text(describe_host(), " ", reason), silent}));
  fail_connection(reason, false, silent);
}

void StoreClient::fail_connection(const std::string& reason, bool is_clean, const std::optional<Culprit>& culprit) {
  Failure failure{ErrorKind::kPeer, text(describe_host(), " ", reason), culprit};
  std::vector<std::shared_ptr<Pending>> unanswered;
  std::lock_guard listening(listener_mutex_);  // first: after stop_listening() returns, no callback may run
  {
    Lock lock(mutex_);
    if (broken_) return;
    broken_ = to_exception(failure);
    is_clean = is_clean || is_over_;
    is_over_ = true;
    for (auto& [id, pending] : pending_) unanswered.push_back(pending);
    pending_.clear();
    ::shutdown(socket_.get(), SHUT_RDWR);  // a store that shuts down waits for this
    changed_.notify_all();
  }
  for (auto& pending : unanswered)
    if (pending->done) pending->done(std::nullopt);
  if (!is_clean) notify_failure("", failure);
}

// Requires listener_mutex_. Stores the failure for listeners that are set later.
void StoreClient::notify_failure(const std::string& group, const Failure& failure) {
  if (group.empty() && !over_) over_ = failure;
  if (listener_) listener_->on_failure(group, failure);
}

}  // namespace lockstep
