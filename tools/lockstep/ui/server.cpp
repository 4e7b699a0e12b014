#include "ui/server.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>

#include <fmt/format.h>
#include <httplib.h>

#include <lockstep/error.h>

#include "base/start_thread.h"
#include "ui/access.h"
#include "ui/answers.h"
#include "ui/page_files.h"

namespace lockstep::ui {
namespace {

constexpr size_t kThreads = 32;  // a browser keeps six connections per page
constexpr size_t kKeepAlive = 10000;
constexpr time_t kIdleSeconds = 2;  // the page polls once a second; the end of the server waits for idle connections

/// No part of the page comes from elsewhere, and no other site may embed or read it.
httplib::Headers security_headers() {
  return {{"Content-Security-Policy",
           "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
          {"X-Content-Type-Options", "nosniff"},
          {"X-Frame-Options", "DENY"},
          {"Referrer-Policy", "no-referrer"},
          {"Cross-Origin-Resource-Policy", "same-origin"},
          {"Cross-Origin-Opener-Policy", "same-origin"},
          {"Cache-Control", "no-cache"}};
}

Parameters parameters_of(const httplib::Request& request) {
  Parameters parameters;
  for (const auto& [name, value] : request.params) parameters[name] = value;
  return parameters;
}

/// A tag for a body: a change of the body changes the tag.
std::string tag_of(const std::string& body) {
  return fmt::format("{:x}-{:x}", std::hash<std::string>()(body), body.size());
}

/// Sets the body. httplib would compress a plain body with Brotli's highest quality, which takes seconds for a
/// megabyte; it does not compress what a provider writes.
void set_body(httplib::Response& response, std::string text, const std::string& content_type) {
  const auto body = std::make_shared<const std::string>(std::move(text));
  response.set_content_provider(body->size(), content_type,
                                [body](size_t offset, size_t length, httplib::DataSink& sink) {
                                  return sink.write(body->data() + offset, length);
                                });
}

void send(const httplib::Request& request, httplib::Response& response, Answer answer) {
  const auto tag = fmt::format("\"{}\"", answer.tag.empty() ? tag_of(answer.body) : answer.tag);
  response.status = answer.status;
  if (answer.status == 200) {
    response.set_header("ETag", tag);
    if (request.get_header_value("If-None-Match") == tag) {
      response.status = 304;
      return;
    }
  }
  set_body(response, std::move(answer.body), answer.content_type);
}

std::string in_brackets(const std::string& address) {
  return address.find(':') == address.npos ? address : "[" + address + "]";
}

}  // namespace

class Server::Implementation {
 public:
  explicit Implementation(const ServerOptions& options)
      : address_(options.address),
        port_(bound(options)),
        access_(token_of(options), options.address, port_),
        catalog_(options.folders) {
    add_handlers();
    thread_ = start_thread("the server of the dashboard", [this] { server_.listen_after_bind(); });
    // stop() has no effect on a server that does not run yet.
    while (!server_.is_running()) std::this_thread::yield();
  }

  ~Implementation() {
    server_.stop();
    thread_.join();
  }

  int port() const { return port_; }
  const Access& access() const { return access_; }
  const std::string& address() const { return address_; }

 private:
  static std::string token_of(const ServerOptions& options) {
    return options.token.empty() ? random_token() : options.token;
  }

  int bound(const ServerOptions& options) {
    server_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };  // httplib deletes it
    server_.set_tcp_nodelay(true);
    server_.set_keep_alive_max_count(kKeepAlive);
    server_.set_keep_alive_timeout(kIdleSeconds);
    server_.set_read_timeout(kIdleSeconds);
    server_.set_payload_max_length(4096);
    server_.set_default_headers(security_headers());
    // Without SO_REUSEPORT, which httplib would set: another user could listen on the same port.
    server_.set_socket_options([](socket_t socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    errno = 0;
    const int port = options.port == 0                                     ? server_.bind_to_any_port(options.address)
                     : server_.bind_to_port(options.address, options.port) ? options.port
                                                                           : -1;
    if (port > 0) return port;
    throw SystemError(fmt::format("cannot listen on {} port {}: {}. Choose another --port or --address.",
                                  options.address, options.port,
                                  errno != 0 ? std::strerror(errno) : "unknown address"));
  }

  /// Answers requests that are not allowed. Returns whether the request was one.
  bool refuse(const httplib::Request& request, httplib::Response& response) const {
    const auto answer = [&](int status, const char* why) {
      response.status = status;
      response.set_content(why, "text/plain; charset=utf-8");
      return true;
    };
    if (!access_.is_own_host(request.get_header_value("Host")))
      return answer(403, "This name is not one of the server's. Open the URL that lockstep ui has printed.\n");
    const bool has_parameter = request.has_param("token") && access_.is_token(request.get_param_value("token"));
    if (!has_parameter && !access_.has_cookie(request.get_header_value("Cookie")) &&
        !access_.has_bearer(request.get_header_value("Authorization")))
      return answer(401, "The token is missing or wrong. Open the URL that lockstep ui has printed.\n");
    if (request.method != "GET" && request.method != "HEAD") return answer(405, "Only GET and HEAD are supported.\n");
    if (has_parameter) response.set_header("Set-Cookie", access_.cookie());
    return false;
  }

  void add_handlers() {
    using Request = httplib::Request;
    using Response = httplib::Response;
    server_.set_pre_routing_handler([this](const Request& request, Response& response) {
      return refuse(request, response) ? httplib::Server::HandlerResponse::Handled
                                       : httplib::Server::HandlerResponse::Unhandled;
    });
    for (const auto& file : page_files()) {
      const auto handler = [&file](const Request& request, Response& response) {
        send(request, response, {.content_type = std::string(file.content_type), .body = std::string(file.content)});
      };
      server_.Get(exactly(file.path), handler);
      if (file.path == "/index.html") server_.Get("/", handler);
    }
    server_.Get("/api/runs", [this](const Request& request, Response& response) {
      const auto tag = tag_of_runs(catalog_);
      const bool is_known = request.get_header_value("If-None-Match") == "\"" + tag + "\"";
      send(request, response, is_known ? Answer{.tag = tag} : answer_runs(catalog_));
    });
    add("/api/curves", answer_curves);
    add("/api/ranks", answer_ranks);
    add("/api/output", answer_output);
    add("/api/checkpoints", answer_checkpoints);
    server_.Get("/metrics", [this](const Request& request, Response& response) {
      send(request, response, answer_open_metrics(catalog_));
    });
    server_.set_error_handler([](const Request&, Response& response) {
      if (response.body.empty() && response.status >= 400)
        response.set_content(fmt::format("{}\n", response.status), "text/plain; charset=utf-8");
    });
  }

  void add(const std::string& path, Answer (*answer)(const RunCatalog&, const Parameters&)) {
    server_.Get(path, [this, answer](const httplib::Request& request, httplib::Response& response) {
      send(request, response, answer(catalog_, parameters_of(request)));
    });
  }

  /// The pattern that matches this path only.
  static std::string exactly(std::string_view path) {
    std::string pattern;
    for (const char c : path) pattern += c == '.' ? std::string("\\.") : std::string(1, c);
    return pattern;
  }

  httplib::Server server_;
  const std::string address_;
  const int port_;
  const Access access_;
  const RunCatalog catalog_;
  std::thread thread_;
};

Server::Server(const ServerOptions& options) : implementation_(std::make_unique<Implementation>(options)) {}
Server::~Server() = default;

int Server::port() const {
  return implementation_->port();
}

const std::string& Server::token() const {
  return implementation_->access().token();
}

std::string Server::url() const {
  const auto& address = implementation_->address();
  const bool is_any = address == "0.0.0.0" || address == "::";
  return fmt::format("http://{}:{}/?token={}", is_any ? "127.0.0.1" : in_brackets(address), port(), token());
}

}  // namespace lockstep::ui
