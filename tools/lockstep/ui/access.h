#pragma once

#include <string>
#include <string_view>

namespace lockstep::ui {

/// 32 random hexadecimal digits. Throws SystemError if the kernel has no random bytes.
std::string random_token();

/// Whether the texts are equal. The time depends only on their lengths.
bool equal_in_constant_time(std::string_view a, std::string_view b);

/// Decides which requests are answered. A page of another site must not read the runs through the user's browser, and
/// other users of the machine must not read them at all. Immutable, so thread-safe.
class Access {
 public:
  /// `address` is the address that the server listens on.
  Access(std::string token, std::string address, int port);

  /// Whether the server may be called by this name. Names that anyone can point at this machine (DNS rebinding) are
  /// refused: only IP addresses, localhost, the host's own name and `address` are accepted, with any port, because a
  /// port that ssh forwards has another number.
  bool is_own_host(std::string_view host_header) const;

  bool is_token(std::string_view written) const { return equal_in_constant_time(written, token_); }
  /// Whether a header "Cookie" has the token.
  bool has_cookie(std::string_view cookie_header) const;
  /// Whether a header "Authorization" is "Bearer TOKEN".
  bool has_bearer_token(std::string_view authorization_header) const;

  /// The value of the header "Set-Cookie". Browsers send the cookies of all ports of a host, so its name has the port.
  std::string cookie() const;
  const std::string& token() const { return token_; }

 private:
  const std::string token_, address_, host_name_, cookie_name_;
};

}  // namespace lockstep::ui
