#include "ui/access.h"

#include <arpa/inet.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "ui/http_message.h"

namespace lockstep::ui {
namespace {

std::string own_host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

bool is_ip_address(const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> ignored{};
  return ::inet_pton(AF_INET, host.c_str(), ignored.data()) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), ignored.data()) == 1;
}

/// The host of "host", "host:port" or "[address]:port".
std::string without_port(std::string_view header) {
  if (header.starts_with('[')) return std::string(header.substr(1, header.find(']') - 1));
  return lower_case(header.substr(0, header.find(':')));
}

}  // namespace

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw SystemError(fmt::format("getrandom: {}", std::strerror(errno)));
  std::string token;
  for (const auto byte : bytes) token += fmt::format("{:02x}", byte);
  return token;
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char differences = 0;
  for (size_t i = 0; i < a.size(); ++i)
    differences = static_cast<unsigned char>(differences | static_cast<unsigned char>(a[i] ^ b[i]));
  return differences == 0;
}

Access::Access(std::string token, std::string address, int port)
    : token_(std::move(token)),
      address_(lower_case(address)),
      host_name_(lower_case(own_host_name())),
      cookie_name_(fmt::format("lockstep_{}", port)) {}

bool Access::is_own_host(std::string_view host_header) const {
  const auto host = without_port(host_header);
  if (host.empty()) return false;
  return host == "localhost" || host == address_ || host == host_name_ || is_ip_address(host);
}

bool Access::has_cookie(std::string_view cookie_header) const {
  const auto wanted = cookie_name_ + "=";
  while (!cookie_header.empty()) {
    auto cookie = cookie_header.substr(0, cookie_header.find(';'));
    cookie_header.remove_prefix(std::min(cookie_header.size(), cookie.size() + 1));
    while (cookie.starts_with(' ')) cookie.remove_prefix(1);
    if (cookie.starts_with(wanted) && is_token(cookie.substr(wanted.size()))) return true;
  }
  return false;
}

bool Access::has_bearer_token(std::string_view authorization_header) const {
  constexpr std::string_view kScheme = "Bearer ";
  return authorization_header.starts_with(kScheme) && is_token(authorization_header.substr(kScheme.size()));
}

std::string Access::cookie() const {
  return fmt::format("{}={}; Path=/; HttpOnly; SameSite=Strict", cookie_name_, token_);
}

}  // namespace lockstep::ui
