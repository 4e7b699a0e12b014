#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Requests and responses of HTTP/1.1 as bytes, without sockets: the part of RFC 9112 that a server of GET and HEAD
/// needs.
namespace lockstep::ui {

/// The text with the letters A to Z in lower case. Pure.
std::string lower_case(std::string_view text);

struct HttpRequest {
  std::string method{};
  std::string path{};                               // of the target, not decoded
  std::map<std::string, std::string> parameters{};  // of the target, decoded; the last parameter of a name counts
  std::map<std::string, std::string> headers{};     // names in lower case; the first header of a name counts
  bool has_body = false;
  bool keeps_connection = false;  // the client may send further requests on this connection

  /// Empty without the header. `name` is in lower case.
  const std::string& header(const std::string& name) const;
};

struct HttpResponse {
  int status = 200;
  std::string content_type{};
  std::string body{};
  std::vector<std::pair<std::string, std::string>> headers{};  // Content-Type, Content-Length, Connection aside
};

/// The size of the head of a request, which ends with an empty line; 0 if `bytes` has no such line. The first `known`
/// bytes are known to have none. Pure.
size_t head_size(std::string_view bytes, size_t known);

/// Parses a whole head. None if it is not a valid request of HTTP/1.0 or 1.1 with a path as target. Absolute targets,
/// such as http://host/path, are refused: only clients of a proxy send them, and the page has no proxy. Pure.
std::optional<HttpRequest> parse_request(std::string_view head);

/// The bytes of a response; with `is_head` without the body, but with its length. `closes` says that the connection
/// ends after this response. Pure.
struct ResponseOptions {
  bool is_head = false, closes = false;
};
std::string to_bytes(const HttpResponse& response, const ResponseOptions& options);

}  // namespace lockstep::ui
