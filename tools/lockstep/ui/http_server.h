#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "ui/http_message.h"

namespace lockstep::ui {

/// The limits of clients. A stranger is a connection that has not sent an allowed request yet.
struct HttpLimits {
  size_t strangers = 64;                          // connections; a further connection closes the oldest stranger
  std::chrono::milliseconds stranger_time{2000};  // from the connection to the first allowed request
  size_t head_bytes = 16 << 10;                   // of a request: browsers send the cookies of all ports of a host
  std::chrono::milliseconds idle_time{60000};     // of other connections, and for clients that do not read a response
};

/// A server for GET and HEAD. One thread serves all sockets and never blocks. Worker threads compute the responses.
///
/// Strangers do not delay other clients: see HttpLimits. Other connections are trusted. Each connection has at most one
/// request in progress, so it takes the memory of one response.
class HttpServer {
 public:
  struct Options {
    HttpLimits limits{};
    std::vector<std::pair<std::string, std::string>> headers{};  // of every response

    /// Returns the response to a request that is not allowed; none for an allowed request. Must not block.
    std::function<std::optional<HttpResponse>(const HttpRequest&)> authorize{};

    /// Returns the response to an allowed request. Called by several threads at once. An exception is a response with
    /// the status 500.
    std::function<HttpResponse(const HttpRequest&)> handle{};
  };

  /// `listener` is a nonblocking socket that listens. Throws SystemError if threads cannot be started.
  HttpServer(FileDescriptor listener, Options options);
  /// Closes all connections. Blocks while a response is computed.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace lockstep::ui
