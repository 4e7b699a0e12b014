// The server on real sockets: who is answered, and what other sites and paths get.

#include "ui/server.h"

#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"
#include "ui/http_client.h"
#include "ui/listener.h"

namespace lockstep::ui {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class DashboardServer : public testing::Test {
 protected:
  DashboardServer() {
    std::filesystem::create_directories(folder_.path() / "runs/a/live");
    std::ofstream(folder_.path() / "runs/a/metrics.jsonl") << "{\"type\":\"step\",\"step\":1,\"loss\":0.5}\n";
    std::ofstream(folder_.path() / "secret.txt") << "not for anybody";
    server_.emplace(ServerOptions{.folders = {folder_.path() / "runs"},
                                  .token = "0123456789abcdef",
                                  .limits = {.stranger_time = std::chrono::hours(1)}});
  }

  /// Sends these bytes and returns all that the server answers until it closes the connection.
  std::string exchanged(const std::string& request) const {
    HttpClient client(server_->port());
    client.send(request);
    return client.receive_all();
  }

  std::string get(const std::string& path, const std::string& headers = "",
                  const std::string& host = "127.0.0.1") const {
    return exchanged(fmt::format("GET {} HTTP/1.1\r\nHost: {}:{}\r\n{}Connection: close\r\n\r\n", path, host,
                                 server_->port(), headers));
  }

  const std::string bearer_ = "Authorization: Bearer 0123456789abcdef\r\n";
  TemporaryFolder folder_;
  std::optional<Server> server_;
};

TEST_F(DashboardServer, AnswersNobodyWithoutTheToken) {
  for (const auto* path : {"/", "/index.html", "/app.js", "/style.css", "/api/runs", "/api/curves", "/api/ranks?run=0",
                           "/api/output?run=0&rank=0", "/api/checkpoints?run=0", "/metrics", "/nothing"}) {
    EXPECT_THAT(get(path), StartsWith("HTTP/1.1 401 ")) << path;
    EXPECT_THAT(get(path), Not(HasSubstr("Set-Cookie"))) << path;
  }
  for (const auto* path :
       {"/?token=", "/?token=0123456789abcdeF", "/?token=0123456789abcdef0", "/?token=0123456789abcde"})
    EXPECT_THAT(get(path), StartsWith("HTTP/1.1 401 ")) << path;
  EXPECT_THAT(get("/api/runs", "Authorization: Bearer wrong\r\n"), StartsWith("HTTP/1.1 401 "));
}

TEST_F(DashboardServer, TurnsTheTokenOfTheUrlIntoACookie) {
  const auto page = get("/?token=0123456789abcdef");
  EXPECT_THAT(page, StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(page, HasSubstr("<title>lockstep</title>"));
  const auto cookie = fmt::format("lockstep_{}=0123456789abcdef", server_->port());
  EXPECT_THAT(page, HasSubstr("Set-Cookie: " + cookie + "; Path=/; HttpOnly; SameSite=Strict"));
  EXPECT_THAT(get("/api/runs", "Cookie: " + cookie + "\r\n"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(server_->url(), testing::EndsWith("/?token=0123456789abcdef"));
}

TEST_F(DashboardServer, RefusesOtherNamesOfThisMachine) {
  for (const auto* host : {"evil.example", "127.0.0.1.evil.example"})
    EXPECT_THAT(get("/api/runs", bearer_, host), StartsWith("HTTP/1.1 403 ")) << host;
  EXPECT_THAT(exchanged("GET /api/runs HTTP/1.1\r\n" + bearer_ + "Connection: close\r\n\r\n"),
              StartsWith("HTTP/1.1 403 "));
  for (const auto* host : {"127.0.0.1", "localhost"})
    EXPECT_THAT(get("/api/runs", bearer_, host), StartsWith("HTTP/1.1 200 ")) << host;
}

TEST_F(DashboardServer, ServesNoFilesButThePage) {
  for (const auto* path :
       {"/../secret.txt", "/../../../../../../etc/passwd", "/%2e%2e/secret.txt", "/..%2fsecret.txt", "//etc/passwd",
        "/runs/a/metrics.jsonl", "/a/metrics.jsonl", "/appXjs", "/index.html/", "/page/app.js", "/app.js%00.html"}) {
    const auto answer = get(path, bearer_);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 404 ")) << path;
    EXPECT_THAT(answer, Not(HasSubstr("not for anybody"))) << path;
    EXPECT_THAT(answer, Not(HasSubstr("root:"))) << path;
  }
  for (const auto* path : {"/api/output?run=0&rank=../../../secret", "/api/output?run=../a&rank=0"})
    EXPECT_THAT(get(path, bearer_), testing::ContainsRegex("^HTTP/1.1 4")) << path;
}

TEST_F(DashboardServer, AllowsNoOtherSitesAndNoThirdParties) {
  const auto page = get("/", bearer_ + "Origin: http://evil.example\r\n");
  EXPECT_THAT(page, HasSubstr("Content-Security-Policy: default-src 'none'; script-src 'self'"));
  EXPECT_THAT(page, HasSubstr("frame-ancestors 'none'"));
  EXPECT_THAT(page, HasSubstr("X-Content-Type-Options: nosniff"));
  EXPECT_THAT(page, HasSubstr("Referrer-Policy: no-referrer"));
  EXPECT_THAT(page, Not(HasSubstr("Access-Control-Allow")));
  EXPECT_THAT(page, Not(HasSubstr("https://")));
  EXPECT_THAT(get("/nothing"), HasSubstr("Content-Security-Policy"));
}

TEST_F(DashboardServer, OnlyReads) {
  for (const auto* method : {"POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
    EXPECT_THAT(exchanged(fmt::format("{} /api/runs HTTP/1.1\r\nHost: localhost\r\n{}Content-Length: 0\r\nConnection: "
                                      "close\r\n\r\n",
                                      method, bearer_)),
                StartsWith("HTTP/1.1 405 "))
        << method;
}

TEST_F(DashboardServer, AnswersChangesOnly) {
  std::string tag;
  const auto answer_with = [&](const std::string& path) {
    const auto answer = get(path, bearer_);
    const auto begin = answer.find("ETag: ") + 6;
    tag = answer.substr(begin, answer.find("\r\n", begin) - begin);
    return get(path, bearer_ + "If-None-Match: " + tag + "\r\n");
  };
  EXPECT_THAT(answer_with("/app.js"), StartsWith("HTTP/1.1 304 "));
  EXPECT_THAT(answer_with("/api/checkpoints?run=0"), StartsWith("HTTP/1.1 304 "));
  EXPECT_THAT(get("/api/checkpoints?run=0", bearer_ + "If-None-Match: \"other\"\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(DashboardServer, SurvivesNonsense) {
  for (const std::string& request :
       {std::string("x\r\n\r\n"), std::string("GET\r\n\r\n"), std::string("GET / HTTP/9.9\r\n\r\n"),
        std::string(100000, 'A'), "GET /" + std::string(20000, 'a') + " HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /api/curves?points=99999999999999999999&from=nan&to=inf&smooth=-3&runs=,,,0 HTTP/1.1\r\nHost: "
        "localhost\r\n" +
            bearer_ + "Connection: close\r\n\r\n",
        std::string("\0\0\0\xff", 4) + "\r\n\r\n"})
    EXPECT_THAT(exchanged(request), StartsWith("HTTP/1.1 ")) << request.substr(0, 100);
  EXPECT_THAT(get("/api/runs", bearer_), StartsWith("HTTP/1.1 200 "));
}

TEST_F(DashboardServer, WritesOpenMetrics) {
  const auto answer = get("/metrics", bearer_);
  EXPECT_THAT(answer, HasSubstr("application/openmetrics-text"));
  EXPECT_THAT(answer, HasSubstr("lockstep_run_metric{"));
  EXPECT_THAT(answer, testing::EndsWith("# EOF\n"));
}

TEST_F(DashboardServer, KeepsAConnectionForFurtherRequests) {
  HttpClient client(server_->port());
  const auto request = [&](const std::string& method, const std::string& path) {
    return fmt::format("{} {} HTTP/1.1\r\nHost: localhost\r\n{}\r\n", method, path, bearer_);
  };
  for (const auto* path : {"/", "/api/runs", "/nothing"}) {
    EXPECT_TRUE(client.send(request("GET", path)));
    EXPECT_THAT(client.receive_response(), Not(HasSubstr("Connection: close"))) << path;
  }
  EXPECT_TRUE(client.send(request("HEAD", "/app.js")));
  const auto head = client.receive_response(false);
  EXPECT_THAT(head, HasSubstr("Content-Type: text/javascript"));
  EXPECT_THAT(head, Not(HasSubstr("Content-Length: 0")));
  EXPECT_THAT(head, testing::EndsWith("\r\n\r\n"));
}

TEST_F(DashboardServer, ListensOnIpv6) {
  try {
    listen_on("::1", 0);
  } catch (const std::exception& error) {
    GTEST_SKIP() << "this machine has no IPv6: " << error.what();
  }
  const Server server({.folders = {}, .address = "::1", .token = "0123456789abcdef"});
  EXPECT_THAT(server.url(), StartsWith(fmt::format("http://[::1]:{}/?token=", server.port())));
  HttpClient client(server.port(), {.to = "::1"});
  EXPECT_TRUE(client.send(fmt::format("GET /api/runs HTTP/1.1\r\nHost: [::1]:{}\r\n{}\r\n", server.port(), bearer_)));
  EXPECT_THAT(client.receive_response(), StartsWith("HTTP/1.1 200 "));
}

TEST_F(DashboardServer, NamesAPortThatIsTaken) {
  try {
    const Server second({.folders = {}, .port = server_->port()});
    FAIL() << "two servers on one port";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr(fmt::format("cannot listen on 127.0.0.1 port {}", server_->port())));
  }
}

}  // namespace
}  // namespace lockstep::ui
