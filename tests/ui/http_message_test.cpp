#include "ui/http_message.h"

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::ui {
namespace {

using testing::ElementsAre;
using testing::Pair;

constexpr const char* kHost = "Host: localhost\r\n";

TEST(HttpRequest, HasMethodPathParametersAndHeaders) {
  const auto request = parse_request(
      "GET /api/curves?metric=a%2Fb+c%20%C3%A9&runs=0,1&runs=2&empty=&&=x&flag HTTP/1.1\r\nHost: localhost:80\r\n"
      "If-None-Match:  \"a b\" \t\r\nX: 1\r\nx: 2\r\n\r\n");
  ASSERT_TRUE(request);
  EXPECT_EQ(request->method, "GET");
  EXPECT_EQ(request->path, "/api/curves");
  EXPECT_THAT(request->parameters,
              ElementsAre(Pair("empty", ""), Pair("flag", ""), Pair("metric", "a/b c \xC3\xA9"), Pair("runs", "2")));
  EXPECT_EQ(request->header("if-none-match"), "\"a b\"");
  EXPECT_EQ(request->header("x"), "1");
  EXPECT_EQ(request->header("cookie"), "");
  EXPECT_TRUE(request->keeps_connection);
  EXPECT_FALSE(request->has_body);
}

TEST(HttpRequest, KeepsWhatIsNoCode) {
  const auto request = parse_request("GET /%2e%2e/a%00b?a=%&b=%4&c=%zz&d=%00 HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(request);
  EXPECT_EQ(request->path, "/%2e%2e/a%00b");
  EXPECT_THAT(request->parameters,
              ElementsAre(Pair("a", "%"), Pair("b", "%4"), Pair("c", "%zz"), Pair("d", std::string(1, '\0'))));
}

TEST(HttpRequest, SaysWhetherTheConnectionContinues) {
  const auto keeps = [](const std::string& version, const std::string& header) {
    const auto request = parse_request("GET / " + version + "\r\n" + kHost + header + "\r\n");
    return request && request->keeps_connection;
  };
  EXPECT_TRUE(keeps("HTTP/1.1", ""));
  EXPECT_TRUE(keeps("HTTP/1.1", "Connection: keep-alive\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.1", "Connection: close\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.1", "connection: foo , CLOSE\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.0", ""));
}

TEST(HttpRequest, SaysWhetherABodyFollows) {
  const auto has_body = [](const std::string& header) {
    const auto request = parse_request(std::string("POST / HTTP/1.1\r\n") + kHost + header + "\r\n");
    return request && request->has_body;
  };
  EXPECT_FALSE(has_body("Content-Length: 0\r\n"));
  for (const auto* header : {"Content-Length: 1\r\n", "Content-Length: x\r\n", "Transfer-Encoding: chunked\r\n"})
    EXPECT_TRUE(has_body(header)) << header;
}

TEST(HttpRequest, IsRefusedUnlessValid) {
  for (const char* line :
       {"", "GET", "GET /", "GET / HTTP/1.2", "GET / HTTP/2.0", "GET / HTTP/1.1 x", "GET  / HTTP/1.1", "G@T / HTTP/1.1",
        "GET x HTTP/1.1", "GET http://localhost/ HTTP/1.1", "GET * HTTP/1.1", "GET /\x7F HTTP/1.1", " GET / HTTP/1.1"})
    EXPECT_FALSE(parse_request(std::string(line) + "\r\n" + kHost + "\r\n")) << line;
  for (const std::string& header :
       {std::string("no colon"), std::string(": x"), std::string("a b: x"), std::string("a : x"), std::string(" a: x"),
        std::string("a: x\n b"), std::string("a: x\ry"), std::string("a: \0", 4), std::string("host: other"),
        std::string("Content-Length: 0\r\ncontent-length: 0")})
    EXPECT_FALSE(parse_request(std::string("GET / HTTP/1.1\r\n") + kHost + header + "\r\n\r\n")) << header;
}

TEST(HttpRequest, SurvivesEveryDamage) {
  const std::string valid = std::string("GET /api/runs?token=%41&x=1 HTTP/1.1\r\n") + kHost + "Cookie: a=b\r\n\r\n";
  ASSERT_TRUE(parse_request(valid));
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    auto damaged = valid.substr(0, random() % (valid.size() + 1));
    for (int change = 0; change < 3 && !damaged.empty(); ++change)
      damaged[random() % damaged.size()] = static_cast<char>(random() % 256);
    parse_request(damaged);
  }
}

TEST(HttpRequest, EndsWithAnEmptyLineInWhateverPiecesItArrives) {
  const std::string head = "GET / HTTP/1.1\r\nA: b\r\n\r\n";
  const std::string bytes = head + "GET /next";
  for (size_t known = 0; known < head.size(); ++known) {
    EXPECT_EQ(head_size(bytes.substr(0, known), 0), 0U);
    EXPECT_EQ(head_size(bytes, known), head.size()) << known;
  }
}

TEST(HttpResponse, HasTheLengthOfItsBody) {
  const HttpResponse response{.content_type = "text/plain", .body = "hello", .headers = {{"ETag", "\"x\""}}};
  EXPECT_EQ(to_bytes(response, {}),
            "HTTP/1.1 200 OK\r\nETag: \"x\"\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello");
  EXPECT_EQ(to_bytes(response, {.is_head = true, .closes = true}),
            "HTTP/1.1 200 OK\r\nETag: \"x\"\r\nContent-Type: text/plain\r\nContent-Length: 5\r\nConnection: "
            "close\r\n\r\n");
  EXPECT_EQ(to_bytes({.status = 304, .headers = {{"ETag", "\"x\""}}}, {}),
            "HTTP/1.1 304 Not Modified\r\nETag: \"x\"\r\n\r\n");
}

}  // namespace
}  // namespace lockstep::ui
