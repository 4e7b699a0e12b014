#pragma once

#include <linux/sockios.h>
#include <netdb.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"

namespace lockstep::ui {

/// A connection to a port of this machine that sends any bytes. It ends with a reset, so that thousands of them leave
/// no ports in TIME_WAIT.
class HttpClient {
 public:
  /// Only a hang takes so long, also on a busy machine.
  static constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(30);

  struct Options {
    std::string to = "127.0.0.1";
    std::string from{};      // empty: the system chooses
    int receive_buffer = 0;  // bytes; 0: the system chooses
  };

  explicit HttpClient(int port) : HttpClient(port, Options{}) {}

  HttpClient(int port, const Options& options) {
    const auto to = numeric_address(options.to, port);
    socket_ = FileDescriptor(::socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const linger at_once{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    if (options.receive_buffer > 0)
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &options.receive_buffer, sizeof options.receive_buffer);
    if (!options.from.empty()) {
      const auto from = numeric_address(options.from, 0);
      if (::bind(socket_.get(), from->ai_addr, from->ai_addrlen) != 0)
        throw std::runtime_error("cannot bind to " + options.from);
    }
    if (::connect(socket_.get(), to->ai_addr, to->ai_addrlen) != 0)
      throw std::runtime_error("cannot connect to the server");
  }

  /// Returns false if the server has closed the connection.
  bool send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const auto put = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (put <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(put));
    }
    return true;
  }

  /// Whether all bytes that were sent are in the buffer of the server's socket.
  bool has_delivered() const {
    int left = 0;
    return ::ioctl(socket_.get(), SIOCOUTQ, &left) == 0 && left == 0;
  }

  /// The bytes that the server sends until it closes the connection, with those that the other functions have received.
  const std::string& receive_all() {
    while (receive()) {
    }
    return received_;
  }

  /// The next whole response: its head and a body of the length that it has. Empty if the connection ends before.
  std::string receive_response(bool has_body = true) {
    constexpr std::string_view kEnd = "\r\n\r\n", kLength = "Content-Length: ";
    while (received_.find(kEnd) == received_.npos)
      if (!receive()) return "";
    size_t size = received_.find(kEnd) + kEnd.size();
    const auto length = received_.find(kLength);
    if (has_body && length < size) size += std::stoul(received_.substr(length + kLength.size()));
    while (received_.size() < size)
      if (!receive()) return "";
    const auto response = received_.substr(0, size);
    received_.erase(0, size);
    return response;
  }

  /// Whether the server has closed the connection, and all that it has sent is received. Does not block.
  bool is_closed() {
    while (is_ready(std::chrono::milliseconds(0)))
      if (!receive()) return true;
    return false;
  }

  /// The client sends no more.
  void end_sending() const { ::shutdown(socket_.get(), SHUT_WR); }

 private:
  static std::unique_ptr<addrinfo, void (*)(addrinfo*)> numeric_address(const std::string& address, int port) {
    addrinfo wanted{}, *found = nullptr;
    wanted.ai_socktype = SOCK_STREAM;
    wanted.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &wanted, &found) != 0)
      throw std::runtime_error(address + " is no address");
    return {found, ::freeaddrinfo};
  }

  bool is_ready(std::chrono::milliseconds limit) const {
    pollfd waiting{socket_.get(), POLLIN, 0};
    return ::poll(&waiting, 1, static_cast<int>(limit.count())) == 1;
  }

  /// Returns false at the end of the connection.
  bool receive() {
    if (!is_ready(kPatience)) throw std::runtime_error("the server neither answers nor closes the connection");
    std::array<char, 65536> bytes;
    const auto got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (got > 0) received_.append(bytes.data(), static_cast<size_t>(got));
    return got > 0;
  }

  FileDescriptor socket_;
  std::string received_;
};

}  // namespace lockstep::ui
