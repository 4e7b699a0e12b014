#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "ui/http_server.h"

namespace lockstep::ui {

struct ServerOptions {
  std::vector<std::filesystem::path> folders{};  // of runs
  std::string address = "127.0.0.1";
  int port = 0;         // 0: any free port
  std::string token{};  // that every request needs; empty: a random one
  HttpLimits limits{};
};

/// Serves the page and its data until it is destroyed. Only reads files.
class Server {
 public:
  /// Starts to listen. Throws SystemError if the address or the port cannot be used.
  explicit Server(const ServerOptions& options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const;
  const std::string& token() const;
  /// The address of the page, with the token.
  std::string url() const;

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace lockstep::ui
