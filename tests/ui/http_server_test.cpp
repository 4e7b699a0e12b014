// Strangers, who have not sent an allowed request, cost little and delay nobody. Time limits that a test is not about
// are an hour, so that nothing depends on the speed of the machine.

#include "ui/http_server.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <list>
#include <mutex>
#include <new>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/eventually.h"
#include "ui/http_client.h"
#include "ui/listener.h"

namespace {

/// Called once, in the next allocation of so many bytes. May throw.
constexpr size_t kLargeAllocation = size_t{8} << 20;
std::atomic<const std::function<void()>*> on_large_allocation = nullptr;

/// A client that reads faster than the server can send: what it receives is counted, and not sent.
struct FastReader {
  std::function<void()> on_first_bytes{};
  std::atomic<size_t> received = 0;
};
constexpr size_t kLargeSend = size_t{64} << 10;  // smaller ones are sent
std::atomic<FastReader*> fast_reader = nullptr;

}  // namespace

void* operator new(size_t size) {
  if (size >= kLargeAllocation)
    if (const auto* function = on_large_allocation.exchange(nullptr)) (*function)();
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return std::malloc(size);
}

void operator delete(void* memory) noexcept {
  std::free(memory);
}

void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

/// Replaces the function of the C library.
extern "C" ssize_t send(int socket, const void* bytes, size_t count, int flags) {
  FastReader* reader = count < kLargeSend ? nullptr : fast_reader.load();
  if (reader == nullptr) return ::sendto(socket, bytes, count, flags, nullptr, 0);
  if (reader->received == 0) reader->on_first_bytes();
  reader->received += kLargeSend;
  return kLargeSend;
}

namespace lockstep::ui {
namespace {

using namespace std::chrono_literals;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr size_t kLargeBody = size_t{16} << 20;  // more than the kernel buffers
const HttpClient::Options kLazy{.receive_buffer = 4096};
constexpr HttpLimits kLongLimits{.stranger_time = 1h, .idle_time = 1h};

/// A server that allows requests with "Key: right". The path /large has a large answer, and that of /slow waits for
/// go_on(). The path /hold stops the thread of the sockets until go_on(). For /memory and /turn see the members.
class HttpConnections : public testing::Test {
 protected:
  void start(const HttpLimits& limits) {
    auto listener = listen_on("127.0.0.1", 0);
    port_ = port_of(listener);
    server_.emplace(std::move(listener),
                    HttpServer::Options{.limits = limits,
                                        .headers = {{"X-Always", "yes"}},
                                        .authorize = [this](const HttpRequest& request) { return authorize(request); },
                                        .handle = [this](const HttpRequest& request) { return handle(request); }});
  }

  ~HttpConnections() override { go_on(); }

  void go_on() {
    const std::lock_guard lock(mutex_);
    may_go_on_ = true;
    changed_.notify_all();
  }

  /// Blocks until so many requests wait for go_on().
  void await_waiting_requests(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_requests_ >= count; });
  }

  HttpClient connect() const { return HttpClient(port_); }

  static std::string request(const std::string& path = "/", const std::string& headers = "") {
    return fmt::format("GET {} HTTP/1.1\r\nHost: localhost\r\nKey: right\r\n{}\r\n", path, headers);
  }

  /// A connection with an answered request.
  HttpClient known() const {
    auto client = connect();
    expect_response(client);
    return client;
  }

  static void expect_response(HttpClient& client) {
    EXPECT_TRUE(client.send(request()));
    EXPECT_THAT(client.receive_response(), EndsWith("\r\n\r\nright"));
  }

  void wait() {
    std::unique_lock lock(mutex_);
    ++waiting_requests_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return may_go_on_; });
  }

  int port_ = 0;
  std::function<void()> on_large_response_{};     // called while the response of /memory is copied
  std::atomic<size_t> received_before_turn_ = 0;  // by the fast reader, when /turn was authorized

 private:
  std::optional<HttpResponse> authorize(const HttpRequest& request) {
    if (request.path == "/hold") wait();
    if (request.path == "/turn") received_before_turn_ = fast_reader.load()->received.load();
    if (request.header("key") == "right") return std::nullopt;
    return HttpResponse{.status = 401, .content_type = "text/plain", .body = "wrong"};
  }

  HttpResponse handle(const HttpRequest& request) {
    if (request.path == "/large") return {.body = std::string(kLargeBody, 'x')};
    if (request.path == "/slow") wait();
    if (request.path == "/memory") {
      HttpResponse response{.body = std::string(kLargeBody, 'x')};
      on_large_allocation = &on_large_response_;
      return response;
    }
    if (request.path == "/throw") throw std::runtime_error("no such number");
    return {.content_type = "text/plain", .body = request.header("key")};
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool may_go_on_ = false;    // guarded by mutex_
  int waiting_requests_ = 0;  // guarded by mutex_

 protected:
  std::optional<HttpServer> server_;  // last: its threads use the others
};

size_t resident_bytes() {
  size_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

/// Changes how many descriptors this process may have, until the object is destroyed.
class DescriptorLimit {
 public:
  DescriptorLimit() { ::getrlimit(RLIMIT_NOFILE, &before_); }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

  /// Returns how many are allowed: at most what an administrator allows.
  size_t set(size_t count) const {
    const rlimit limit{std::min<rlim_t>(count, before_.rlim_max), before_.rlim_max};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("cannot change the limit of descriptors");
    return limit.rlim_cur;
  }

  /// Lets this process open one more.
  void allow_one() const {
    const int lowest_free = ::dup(STDIN_FILENO);
    ::close(lowest_free);
    set(static_cast<size_t>(lowest_free) + 1);
  }

 private:
  rlimit before_{};
};

TEST_F(HttpConnections, AnswerOneRequestAfterTheOther) {
  start(kLongLimits);
  auto client = connect();
  for (int i = 0; i < 3; ++i) expect_response(client);
  EXPECT_TRUE(client.send(request() + request("/throw") + "HEAD / HTTP/1.1\r\nKey: right\r\n\r\n"));  // all at once
  EXPECT_THAT(client.receive_response(), EndsWith("right"));
  EXPECT_THAT(client.receive_response(), testing::AllOf(StartsWith("HTTP/1.1 500 "), EndsWith("no such number\n")));
  EXPECT_THAT(client.receive_response(false),
              testing::AllOf(HasSubstr("Content-Length: 5"), HasSubstr("X-Always: yes"), EndsWith("\r\n\r\n")));
  EXPECT_TRUE(client.send(request("/", "Connection: close\r\n")));
  EXPECT_THAT(client.receive_all(), testing::AllOf(HasSubstr("Connection: close"), EndsWith("right")));
}

TEST_F(HttpConnections, AnswerARequestInPieces) {
  start(kLongLimits);
  auto client = connect();
  for (const char byte : "\r\n" + request()) EXPECT_TRUE(client.send({&byte, 1}));
  EXPECT_THAT(client.receive_response(), EndsWith("right"));
  const auto bytes = "\r\n\r\n" + request();
  EXPECT_TRUE(client.send(bytes.substr(0, bytes.size() - 2)));
  EXPECT_TRUE(eventually([&] { return client.has_delivered(); }, HttpClient::kPatience));
  known();  // so the server has received the first piece
  EXPECT_TRUE(client.send("\r\n"));
  EXPECT_THAT(client.receive_response(), EndsWith("right"));
  EXPECT_TRUE(client.send(bytes));
  EXPECT_THAT(client.receive_response(), EndsWith("right"));
}

TEST_F(HttpConnections, HaveAnErrorIfTheResponseNeedsTooMuchMemory) {
  start(kLongLimits);
  on_large_response_ = [] { throw std::bad_alloc(); };
  auto client = connect();
  EXPECT_TRUE(client.send(request("/memory")));
  EXPECT_THAT(client.receive_response(), StartsWith("HTTP/1.1 500 "));
  expect_response(client);
}

TEST_F(HttpConnections, AnswerAClientThatSendsNoMore) {
  start(kLongLimits);
  auto client = connect();
  EXPECT_TRUE(client.send(request()));
  client.end_sending();
  EXPECT_THAT(client.receive_all(), EndsWith("right"));
}

TEST_F(HttpConnections, EndAfterARequestThatIsNotAllowedOrNotValid) {
  start(kLongLimits);
  for (const auto& [bytes, status] :
       {std::pair(std::string("GET / HTTP/1.1\r\nKey: wrong\r\n\r\n"), "401"), {"nonsense\r\n\r\n", "400"}}) {
    for (const bool is_known : {false, true}) {
      auto client = is_known ? known() : connect();
      EXPECT_TRUE(client.send(bytes));
      EXPECT_THAT(client.receive_all(), testing::AllOf(StartsWith(fmt::format("HTTP/1.1 {} ", status)),
                                                       HasSubstr("X-Always: yes"), HasSubstr("Connection: close")));
    }
  }
}

TEST_F(HttpConnections, EndWhenAHeadIsTooLong) {
  start(kLongLimits);
  const auto before = resident_bytes();
  const auto line = "X: " + std::string(4000, 'x') + "\r\n";
  for (const std::string& part : {line, std::string(4000, 'x')}) {
    for (const bool is_known : {false, true}) {
      auto client = is_known ? known() : connect();
      client.send("GET / HTTP/1.1\r\n");
      size_t sent = 0;
      while (sent < (size_t{1} << 30) && client.send(part)) sent += part.size();
      EXPECT_LT(sent, size_t{1} << 30) << "the server reads without end";
    }
  }
  EXPECT_LT(resident_bytes(), before + (size_t{32} << 20));
  auto client = connect();
  client.send("GET / HTTP/1.1\r\n" + std::string(16 << 10, 'x'));
  EXPECT_THAT(client.receive_all(), StartsWith("HTTP/1.1 431 "));
}

TEST_F(HttpConnections, AreAcceptedWhileAThousandStrangersAreIdle) {
  const DescriptorLimit limit;
  const size_t kept = 150, count = std::min<size_t>(1000, std::max(limit.set(1200), kept) - kept);
  start(kLongLimits);
  auto first = known();
  std::list<HttpClient> strangers;
  for (size_t i = 0; i < count; ++i) strangers.emplace_back(port_).send("GET / HTTP/1.1\r\n");
  known();
  expect_response(first);
  size_t closed = 0;
  EXPECT_TRUE(eventually(
      [&] {
        strangers.remove_if([&](HttpClient& client) { return client.is_closed() && ++closed != 0; });
        return closed + kLongLimits.strangers >= count;
      },
      HttpClient::kPatience));
}

TEST_F(HttpConnections, AreAcceptedWhileStrangersSendSlowly) {
  start(kLongLimits);
  std::list<HttpClient> strangers;
  for (int i = 0; i < 40; ++i) strangers.emplace_back(port_);
  known();
  const auto bytes = "GET / HTTP/1.1\r\nX: " + std::string(100, 'x');
  for (const char byte : bytes) {
    for (auto& stranger : strangers) EXPECT_TRUE(stranger.send({&byte, 1}));
    if (byte == ' ') known();
  }
  for (auto& stranger : strangers) EXPECT_FALSE(stranger.is_closed());
}

TEST_F(HttpConnections, OfStrangersEndAlsoWhileBytesArrive) {
  start({.stranger_time = 500ms, .idle_time = 1h});  // far longer than the pause between two bytes
  EXPECT_THAT(connect().receive_all(), IsEmpty());
  auto slow = connect();
  slow.send("GET / HTTP/1.1\r\nX: ");
  EXPECT_TRUE(eventually([&] { return !slow.send("x") || slow.is_closed(); }, HttpClient::kPatience));
  EXPECT_THAT(slow.receive_all(), IsEmpty()) << "closed for another reason";
}

TEST_F(HttpConnections, ThatAreKnownOutlastStrangers) {
  auto limits = kLongLimits;
  limits.strangers = 4;
  start(limits);
  auto first = known(), second = known();
  std::list<HttpClient> strangers;
  for (int i = 0; i < 100; ++i) strangers.emplace_back(port_);
  EXPECT_TRUE(eventually([&] { return strangers.front().is_closed(); }, HttpClient::kPatience));
  for (int i = 0; i < 100; ++i) strangers.emplace_back(port_).send("nonsense\r\n\r\n");
  EXPECT_THAT(strangers.back().receive_all(), StartsWith("HTTP/1.1 400 "));
  expect_response(first);
  expect_response(second);
}

TEST_F(HttpConnections, ThatAreKnownOutlastTheTimeOfStrangers) {
  start({.stranger_time = 50ms, .idle_time = 1h});
  std::optional<HttpClient> client;
  EXPECT_TRUE(eventually(
      [&] {  // a slow machine needs longer than a stranger has
        client.emplace(port_);
        return client->send(request()) && client->receive_response() != "";
      },
      HttpClient::kPatience));
  EXPECT_THAT(connect().receive_all(), IsEmpty());  // a later stranger is closed
  expect_response(*client);
}

TEST_F(HttpConnections, OfAFloodDisplaceNoRequestThatHasArrived) {
  auto limits = kLongLimits;
  limits.strangers = 1;
  start(limits);
  auto holds = connect();
  EXPECT_TRUE(holds.send(request("/hold")));
  await_waiting_requests(1);
  auto client = connect();
  EXPECT_TRUE(client.send(request()));
  std::list<HttpClient> strangers;
  for (int i = 0; i < 10; ++i) strangers.emplace_back(port_);
  go_on();
  EXPECT_THAT(client.receive_response(), EndsWith("right"));
}

TEST_F(HttpConnections, OfAFloodDisplaceNoneOfAnotherHost) {
  auto limits = kLongLimits;
  limits.strangers = 4;
  start(limits);
  HttpClient other(port_, {.from = "127.0.0.2"});  // the oldest
  std::list<HttpClient> flood;
  for (int i = 0; i < 100; ++i) flood.emplace_back(port_);
  EXPECT_THAT(flood.front().receive_all(), IsEmpty());
  known();  // so all before it are accepted
  expect_response(other);
}

TEST_F(HttpConnections, ThatReadFastTakeTurnsWithOthers) {
  start(kLongLimits);
  auto other = known();
  FastReader reader{.on_first_bytes = [&] {
    EXPECT_TRUE(other.send(request("/turn")));
    EXPECT_TRUE(eventually([&] { return other.has_delivered(); }, HttpClient::kPatience));
  }};
  fast_reader = &reader;
  auto fast = connect();
  EXPECT_TRUE(fast.send(request("/large")));
  EXPECT_THAT(other.receive_response(), EndsWith("right"));
  EXPECT_LT(received_before_turn_, kLargeBody / 2);
  server_.reset();
  fast_reader = nullptr;
}

TEST_F(HttpConnections, WhoseResponseIsCopiedDelayNobody) {
  start(kLongLimits);
  on_large_response_ = [&] { wait(); };
  auto large = connect();
  EXPECT_TRUE(large.send(request("/memory")));
  await_waiting_requests(1);
  known();
  go_on();
  EXPECT_GT(large.receive_response().size(), kLargeBody);
}

TEST_F(HttpConnections, ThatDoNotReadDelayNobody) {
  start(kLongLimits);
  std::list<HttpClient> clients;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(clients.emplace_back(port_, kLazy).send(request("/large")));
  auto other = known();
  for (int i = 0; i < 10; ++i) expect_response(other);
  EXPECT_GT(clients.back().receive_response().size(), kLargeBody) << "the whole answer, when the client reads it";
}

TEST_F(HttpConnections, ThatDoNotReadEndAfterTheIdleTime) {
  start({.stranger_time = 1h, .idle_time = 50ms});
  HttpClient client(port_, kLazy);
  EXPECT_TRUE(client.send(request("/slow")));
  await_waiting_requests(1);
  EXPECT_THAT(known().receive_all(), IsEmpty()) << "the idle time of a later connection is over";
  go_on();
  EXPECT_THAT(client.receive_all(), EndsWith("right")) << "not idle before the answer";
  HttpClient lazy(port_, kLazy);
  EXPECT_TRUE(lazy.send(request("/large")));
  EXPECT_TRUE(eventually([&] { return !lazy.send("x"); }, HttpClient::kPatience));
}

TEST_F(HttpConnections, WaitForTheirOwnAnswersOnly) {
  start(kLongLimits);
  auto slow = connect();
  EXPECT_TRUE(slow.send(request("/slow")));
  await_waiting_requests(1);
  known();
  {
    auto leaves = connect();
    EXPECT_TRUE(leaves.send(request("/slow")));
    await_waiting_requests(2);
  }
  known();
  go_on();
  EXPECT_THAT(slow.receive_response(), EndsWith("right"));
}

TEST_F(HttpConnections, AreRefusedWhileAllWorkersAreBusy) {
  start(kLongLimits);
  std::list<HttpClient> slow;
  for (int i = 0; i < 12; ++i) EXPECT_TRUE(slow.emplace_back(port_).send(request("/slow")));
  await_waiting_requests(8);
  for (const auto& [bytes, status] :
       {std::pair("GET / HTTP/1.1\r\nKey: wrong\r\n\r\n", "401"), {"nonsense\r\n\r\n", "400"}}) {
    auto client = connect();
    EXPECT_TRUE(client.send(bytes));
    EXPECT_THAT(client.receive_all(), StartsWith(fmt::format("HTTP/1.1 {} ", status)));
  }
  go_on();
  for (auto& client : slow) EXPECT_THAT(client.receive_response(), EndsWith("right"));
}

TEST_F(HttpConnections, AreClosedWhenTheServerEnds) {
  start(kLongLimits);
  auto idle = connect(), kept = known();
  server_.reset();
  EXPECT_THAT(idle.receive_all(), IsEmpty());
  EXPECT_THAT(kept.receive_all(), IsEmpty());
}

TEST_F(HttpConnections, DisplaceStrangersWhenDescriptorsRunOut) {
  start(kLongLimits);
  std::list<HttpClient> strangers;
  for (int i = 0; i < 5; ++i) strangers.emplace_back(port_);
  auto first = known();  // so the strangers before it are accepted
  {
    const DescriptorLimit limit;
    limit.allow_one();
    auto client = connect();  // takes it
    expect_response(client);
  }
  expect_response(first);
}

TEST_F(HttpConnections, WaitForADescriptorThatBecomesFree) {
  start(kLongLimits);
  auto first = known();
  std::optional<FileDescriptor> spare(::dup(STDIN_FILENO));
  const DescriptorLimit limit;
  limit.allow_one();
  auto client = connect();  // takes it
  EXPECT_TRUE(client.send(request()));
  for (int i = 0; i < 2; ++i) expect_response(first);  // the server has tried to accept the other one
  EXPECT_FALSE(client.is_closed());
  spare.reset();
  EXPECT_THAT(client.receive_response(), EndsWith("right"));
}

}  // namespace
}  // namespace lockstep::ui
