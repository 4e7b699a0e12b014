// Strangers, who have not sent an allowed request, cost little and delay nobody. Time limits that a test is not about
// are an hour, so that nothing depends on the speed of the machine.

#include "ui/http_server.h"

#include <sys/resource.h>
#include <unistd.h>

#include <condition_variable>
#include <fstream>
#include <list>
#include <mutex>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/eventually.h"
#include "ui/http_client.h"
#include "ui/listener.h"

namespace lockstep::ui {
namespace {

using namespace std::chrono_literals;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr size_t kLargeAnswer = size_t{16} << 20;  // more than the kernel buffers
constexpr HttpLimits kLongLimits{.stranger_time = 1h, .idle_time = 1h};

/// A server that allows requests with "Key: right". The path /large has a large answer, and that of /slow waits for
/// go_on(). The path /hold stops the thread of the sockets until go_on().
class HttpConnections : public testing::Test {
 protected:
  void start(const HttpLimits& limits) {
    auto listener = listen_on("127.0.0.1", 0);
    port_ = port_of(listener);
    server_.emplace(std::move(listener),
                    HttpServer::Options{.limits = limits,
                                        .headers = {{"X-Always", "yes"}},
                                        .refuse = [this](const HttpRequest& request) { return refuse(request); },
                                        .answer = [this](const HttpRequest& request) { return answer(request); }});
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
    expect_answer(client);
    return client;
  }

  static void expect_answer(HttpClient& client) {
    EXPECT_TRUE(client.say(request()));
    EXPECT_THAT(client.hear_answer(), EndsWith("\r\n\r\nright"));
  }

  int port_ = 0;

 private:
  void wait() {
    std::unique_lock lock(mutex_);
    ++waiting_requests_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return may_go_on_; });
  }

  std::optional<HttpResponse> refuse(const HttpRequest& request) {
    if (request.path == "/hold") wait();
    if (request.header("key") == "right") return std::nullopt;
    return HttpResponse{.status = 401, .content_type = "text/plain", .body = "wrong"};
  }

  HttpResponse answer(const HttpRequest& request) {
    if (request.path == "/large") return {.body = std::string(kLargeAnswer, 'x')};
    if (request.path == "/slow") wait();
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

/// Lets this process have so many more descriptors; false if it must not.
bool allow_descriptors(rlim_t count) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= count) return true;
  limit.rlim_cur = std::min(count, limit.rlim_max);
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= count;
}

TEST_F(HttpConnections, AnswerOneRequestAfterTheOther) {
  start(kLongLimits);
  auto client = connect();
  for (int i = 0; i < 3; ++i) expect_answer(client);
  EXPECT_TRUE(client.say(request() + request("/throw") + "HEAD / HTTP/1.1\r\nKey: right\r\n\r\n"));  // all at once
  EXPECT_THAT(client.hear_answer(), EndsWith("right"));
  EXPECT_THAT(client.hear_answer(), testing::AllOf(StartsWith("HTTP/1.1 500 "), EndsWith("no such number\n")));
  EXPECT_THAT(client.hear_answer(false),
              testing::AllOf(HasSubstr("Content-Length: 5"), HasSubstr("X-Always: yes"), EndsWith("\r\n\r\n")));
  EXPECT_TRUE(client.say(request("/", "Connection: close\r\n")));
  EXPECT_THAT(client.hear_all(), testing::AllOf(HasSubstr("Connection: close"), EndsWith("right")));
}

TEST_F(HttpConnections, AnswerARequestInPieces) {
  start(kLongLimits);
  auto client = connect();
  for (const char byte : "\r\n" + request()) EXPECT_TRUE(client.say({&byte, 1}));
  EXPECT_THAT(client.hear_answer(), EndsWith("right"));
}

TEST_F(HttpConnections, AnswerAClientThatSendsNoMore) {
  start(kLongLimits);
  auto client = connect();
  EXPECT_TRUE(client.say(request()));
  client.end_sending();
  EXPECT_THAT(client.hear_all(), EndsWith("right"));
}

TEST_F(HttpConnections, EndAfterARequestThatIsNotAllowedOrNotValid) {
  start(kLongLimits);
  for (const auto& [bytes, status] :
       {std::pair(std::string("GET / HTTP/1.1\r\nKey: wrong\r\n\r\n"), "401"), {"nonsense\r\n\r\n", "400"}}) {
    for (const bool is_known : {false, true}) {
      auto client = is_known ? known() : connect();
      EXPECT_TRUE(client.say(bytes));
      EXPECT_THAT(client.hear_all(), testing::AllOf(StartsWith(fmt::format("HTTP/1.1 {} ", status)),
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
      client.say("GET / HTTP/1.1\r\n");
      size_t sent = 0;
      while (sent < (size_t{1} << 30) && client.say(part)) sent += part.size();
      EXPECT_LT(sent, size_t{1} << 30) << "the server reads without end";
    }
  }
  EXPECT_LT(resident_bytes(), before + (size_t{32} << 20));
  auto client = connect();
  client.say("GET / HTTP/1.1\r\n" + std::string(16 << 10, 'x'));
  EXPECT_THAT(client.hear_all(), StartsWith("HTTP/1.1 431 "));
}

TEST_F(HttpConnections, AreAcceptedWhileAThousandStrangersAreIdle) {
  if (!allow_descriptors(1200)) GTEST_SKIP() << "too few open files are allowed";
  start(kLongLimits);
  auto first = known();
  std::list<HttpClient> strangers;
  for (int i = 0; i < 1000; ++i) strangers.emplace_back(port_).say("GET / HTTP/1.1\r\n");
  known();
  expect_answer(first);
  size_t closed = 0;
  EXPECT_TRUE(eventually(
      [&] {
        strangers.remove_if([&](HttpClient& client) { return client.is_closed() && ++closed != 0; });
        return closed >= 1000 - kLongLimits.strangers;
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
    for (auto& stranger : strangers) EXPECT_TRUE(stranger.say({&byte, 1}));
    if (byte == ' ') known();
  }
  for (auto& stranger : strangers) EXPECT_FALSE(stranger.is_closed());
}

TEST_F(HttpConnections, OfStrangersEndAlsoWhileBytesArrive) {
  start({.stranger_time = 500ms, .idle_time = 1h});  // far longer than the pause between two bytes
  EXPECT_THAT(connect().hear_all(), IsEmpty());
  auto slow = connect();
  slow.say("GET / HTTP/1.1\r\nX: ");
  EXPECT_TRUE(eventually([&] { return !slow.say("x") || slow.is_closed(); }, HttpClient::kPatience));
  EXPECT_THAT(slow.hear_all(), IsEmpty()) << "closed for another reason";
}

TEST_F(HttpConnections, ThatAreKnownOutlastStrangers) {
  auto limits = kLongLimits;
  limits.strangers = 4;
  start(limits);
  auto first = known(), second = known();
  std::list<HttpClient> strangers;
  for (int i = 0; i < 100; ++i) strangers.emplace_back(port_);
  EXPECT_TRUE(eventually([&] { return strangers.front().is_closed(); }, HttpClient::kPatience));
  for (int i = 0; i < 100; ++i) strangers.emplace_back(port_).say("nonsense\r\n\r\n");
  EXPECT_THAT(strangers.back().hear_all(), StartsWith("HTTP/1.1 400 "));
  expect_answer(first);
  expect_answer(second);
}

TEST_F(HttpConnections, ThatAreKnownOutlastTheTimeOfStrangers) {
  start({.stranger_time = 50ms, .idle_time = 1h});
  std::optional<HttpClient> client;
  EXPECT_TRUE(eventually(
      [&] {  // a slow machine needs longer than a stranger has
        client.emplace(port_);
        return client->say(request()) && client->hear_answer() != "";
      },
      HttpClient::kPatience));
  EXPECT_THAT(connect().hear_all(), IsEmpty());  // a later stranger is closed
  expect_answer(*client);
}

TEST_F(HttpConnections, OfAFloodDisplaceNoRequestThatHasArrived) {
  auto limits = kLongLimits;
  limits.strangers = 1;
  start(limits);
  auto holds = connect();
  EXPECT_TRUE(holds.say(request("/hold")));
  await_waiting_requests(1);
  auto client = connect();
  EXPECT_TRUE(client.say(request()));
  std::list<HttpClient> strangers;
  for (int i = 0; i < 10; ++i) strangers.emplace_back(port_);
  go_on();
  EXPECT_THAT(client.hear_answer(), EndsWith("right"));
}

TEST_F(HttpConnections, ThatDoNotReadDelayNobody) {
  start(kLongLimits);
  std::list<HttpClient> clients;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(clients.emplace_back(port_, 4096).say(request("/large")));
  auto other = known();
  for (int i = 0; i < 10; ++i) expect_answer(other);
  EXPECT_GT(clients.back().hear_answer().size(), kLargeAnswer) << "the whole answer, when the client reads it";
}

TEST_F(HttpConnections, ThatDoNotReadEndAfterTheIdleTime) {
  start({.stranger_time = 1h, .idle_time = 50ms});
  HttpClient client(port_, 4096);
  EXPECT_TRUE(client.say(request("/slow")));
  await_waiting_requests(1);
  EXPECT_THAT(known().hear_all(), IsEmpty()) << "the idle time of a later connection is over";
  go_on();
  EXPECT_THAT(client.hear_all(), EndsWith("right")) << "not idle before the answer";
  HttpClient lazy(port_, 4096);
  EXPECT_TRUE(lazy.say(request("/large")));
  EXPECT_TRUE(eventually([&] { return !lazy.say("x"); }, HttpClient::kPatience));
}

TEST_F(HttpConnections, WaitForTheirOwnAnswersOnly) {
  start(kLongLimits);
  auto slow = connect();
  EXPECT_TRUE(slow.say(request("/slow")));
  await_waiting_requests(1);
  known();
  {
    auto leaves = connect();
    EXPECT_TRUE(leaves.say(request("/slow")));
    await_waiting_requests(2);
  }
  known();
  go_on();
  EXPECT_THAT(slow.hear_answer(), EndsWith("right"));
}

TEST_F(HttpConnections, AreClosedWhenTheServerEnds) {
  start(kLongLimits);
  auto idle = connect(), kept = known();
  server_.reset();
  EXPECT_THAT(idle.hear_all(), IsEmpty());
  EXPECT_THAT(kept.hear_all(), IsEmpty());
}

TEST_F(HttpConnections, DisplaceStrangersWhenDescriptorsRunOut) {
  start(kLongLimits);
  std::list<HttpClient> strangers;
  for (int i = 0; i < 5; ++i) strangers.emplace_back(port_);
  auto first = known();  // so the strangers before it are accepted
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const int last = ::dup(STDIN_FILENO);  // the lowest free one
  ::close(last);
  const rlimit few{static_cast<rlim_t>(last) + 1, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  auto client = connect();  // takes it
  EXPECT_TRUE(client.say(request()));
  EXPECT_THAT(client.hear_answer(), EndsWith("right"));
  ::setrlimit(RLIMIT_NOFILE, &before);
  expect_answer(first);
}

}  // namespace
}  // namespace lockstep::ui
