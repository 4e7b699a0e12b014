#include "ui/http_message.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>

namespace lockstep::ui {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr std::string_view kHeadEnd = "\r\n\r\n";

/// Whether the text is a token of RFC 9110: the name of a method or a header.
bool is_token(std::string_view written) {
  static constexpr std::string_view kSigns = "!#$%&'*+-.^_`|~";
  return !written.empty() && std::all_of(written.begin(), written.end(), [](unsigned char c) {
    return c < 0x80 && (std::isalnum(c) != 0 || kSigns.find(static_cast<char>(c)) != kSigns.npos);
  });
}

bool is_control(unsigned char c) {
  return c < ' ' || c == 0x7F;
}

std::string_view without_blanks(std::string_view written) {
  constexpr std::string_view kBlanks = " \t";
  const auto begin = written.find_first_not_of(kBlanks);
  if (begin == written.npos) return "";
  return written.substr(begin, written.find_last_not_of(kBlanks) - begin + 1);
}

/// Removes the text up to `separator` from `rest` and returns it; the whole rest if there is no separator.
std::string_view take(std::string_view& rest, std::string_view separator) {
  const auto part = rest.substr(0, rest.find(separator));
  rest.remove_prefix(std::min(rest.size(), part.size() + separator.size()));
  return part;
}

int hexadecimal(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/// The text without percent-encoding, as forms write it: a plus is a blank. A '%' without two digits stays.
std::string decoded(std::string_view written) {
  std::string result;
  for (size_t i = 0; i < written.size(); ++i) {
    const bool is_code = written[i] == '%' && i + 2 < written.size() && hexadecimal(written[i + 1]) >= 0 &&
                         hexadecimal(written[i + 2]) >= 0;
    if (is_code) {
      result += static_cast<char>(hexadecimal(written[i + 1]) * 16 + hexadecimal(written[i + 2]));
      i += 2;
    } else {
      result += written[i] == '+' ? ' ' : written[i];
    }
  }
  return result;
}

std::map<std::string, std::string> parse_parameters(std::string_view query) {
  std::map<std::string, std::string> parameters;
  while (!query.empty()) {
    auto value = take(query, "&");
    const auto name = take(value, "=");
    if (!name.empty()) parameters[decoded(name)] = decoded(value);
  }
  return parameters;
}

bool parse_target(std::string_view target, HttpRequest& request) {
  const bool is_path = target.starts_with('/') &&
                       std::none_of(target.begin(), target.end(), [](unsigned char c) { return is_control(c); });
  request.path = take(target, "?");
  request.parameters = parse_parameters(take(target, "#"));
  return is_path;
}

/// Refuses a second Host or Content-Length, and lines that continue the line before, as RFC 9112 requires.
bool parse_header(std::string_view line, HttpRequest& request) {
  const bool has_colon = line.find(':') != line.npos;
  const auto name = take(line, ":");
  const auto value = without_blanks(line);
  const bool is_valid = has_colon && is_token(name) && std::none_of(value.begin(), value.end(), [](unsigned char c) {
                          return is_control(c) && c != '\t';
                        });
  const auto [header, is_first] = request.headers.emplace(lower_case(name), value);
  return is_valid && (is_first || (header->first != "host" && header->first != "content-length"));
}

bool has_option(std::string_view list, std::string_view option) {
  while (!list.empty())
    if (lower_case(without_blanks(take(list, ","))) == option) return true;
  return false;
}

const char* reason_of(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 413:
      return "Content Too Large";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    default:
      return "";  // a reason is optional
  }
}

}  // namespace

std::string lower_case(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c; });
  return result;
}

const std::string& HttpRequest::header(const std::string& name) const {
  static const std::string kNone;
  const auto found = headers.find(name);
  return found == headers.end() ? kNone : found->second;
}

size_t head_size(std::string_view bytes, size_t known) {
  const auto end = bytes.find(kHeadEnd, known - std::min(known, kHeadEnd.size() - 1));
  return end == bytes.npos ? 0 : end + kHeadEnd.size();
}

std::optional<HttpRequest> parse_request(std::string_view head) {
  HttpRequest request;
  auto line = take(head, kLineEnd);
  request.method = take(line, " ");
  const auto target = take(line, " ");
  const bool is_current = line == "HTTP/1.1";
  if (!is_token(request.method) || !parse_target(target, request)) return std::nullopt;
  if (!is_current && line != "HTTP/1.0") return std::nullopt;
  for (auto header = take(head, kLineEnd); !header.empty(); header = take(head, kLineEnd))
    if (!parse_header(header, request)) return std::nullopt;
  const auto& length = request.header("content-length");
  request.has_body = request.headers.contains("transfer-encoding") || (!length.empty() && length != "0");
  request.keeps_connection = is_current && !has_option(request.header("connection"), "close");
  return request;
}

std::string to_bytes(const HttpResponse& response, const ResponseOptions& options) {
  auto bytes = fmt::format("HTTP/1.1 {} {}\r\n", response.status, reason_of(response.status));
  for (const auto& [name, value] : response.headers) bytes += fmt::format("{}: {}\r\n", name, value);
  const bool may_have_body = response.status != 304;
  if (may_have_body)
    bytes += fmt::format("Content-Type: {}\r\nContent-Length: {}\r\n", response.content_type, response.body.size());
  if (options.closes) bytes += "Connection: close\r\n";
  bytes += kLineEnd;
  if (may_have_body && !options.is_head) bytes += response.body;
  return bytes;
}

}  // namespace lockstep::ui
