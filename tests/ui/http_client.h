#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"

namespace lockstep::ui {

/// A connection to a port of loopback that sends any bytes. It ends with a reset, so that thousands of them leave no
/// ports in TIME_WAIT.
class HttpClient {
 public:
  /// Only a hang takes so long, also on a busy machine.
  static constexpr std::chrono::milliseconds kPatience = std::chrono::minutes(2);

  explicit HttpClient(int port, int receive_buffer = 0) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const linger at_once{1, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    if (receive_buffer > 0) ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
      throw std::runtime_error("cannot connect to the server");
  }

  /// Returns false if the server has closed the connection.
  bool say(std::string_view bytes) const {
    while (!bytes.empty()) {
      const auto put = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (put <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(put));
    }
    return true;
  }

  /// The bytes that the server sends until it closes the connection, with those that the other functions have received.
  const std::string& hear_all() {
    while (receive()) {
    }
    return heard_;
  }

  /// The next whole answer: its head and a body of the length that it has. Empty if the connection ends before.
  std::string hear_answer(bool has_body = true) {
    constexpr std::string_view kEnd = "\r\n\r\n", kLength = "Content-Length: ";
    while (heard_.find(kEnd) == heard_.npos)
      if (!receive()) return "";
    size_t size = heard_.find(kEnd) + kEnd.size();
    const auto length = heard_.find(kLength);
    if (has_body && length < size) size += std::stoul(heard_.substr(length + kLength.size()));
    while (heard_.size() < size)
      if (!receive()) return "";
    const auto answer = heard_.substr(0, size);
    heard_.erase(0, size);
    return answer;
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
  bool is_ready(std::chrono::milliseconds limit) const {
    pollfd waiting{socket_.get(), POLLIN, 0};
    return ::poll(&waiting, 1, static_cast<int>(limit.count())) == 1;
  }

  /// Returns false at the end of the connection.
  bool receive() {
    if (!is_ready(kPatience)) throw std::runtime_error("the server neither answers nor closes the connection");
    std::array<char, 65536> bytes;
    const auto got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (got > 0) heard_.append(bytes.data(), static_cast<size_t>(got));
    return got > 0;
  }

  FileDescriptor socket_;
  std::string heard_;
};

}  // namespace lockstep::ui
