#include "ui/server.h"

#include <functional>
#include <map>

#include <fmt/format.h>

#include "ui/access.h"
#include "ui/answers.h"
#include "ui/listener.h"
#include "ui/page_files.h"

namespace lockstep::ui {
namespace {

constexpr const char* kPlainText = "text/plain; charset=utf-8";

/// All parts of the page come from this server, and no other site may embed or read it.
std::vector<std::pair<std::string, std::string>> security_headers() {
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

/// A tag for a body: a change of the body changes the tag.
std::string tag_of(const std::string& body) {
  return fmt::format("{:x}-{:x}", std::hash<std::string>()(body), body.size());
}

/// Returns the answer with its tag, and without the body if the client has it.
HttpResponse response_to(const HttpRequest& request, Answer answer) {
  HttpResponse response{.status = answer.status, .content_type = std::move(answer.content_type)};
  if (answer.status == 200) {
    const auto tag = fmt::format("\"{}\"", answer.tag.empty() ? tag_of(answer.body) : answer.tag);
    response.headers.emplace_back("ETag", tag);
    if (request.header("if-none-match") == tag) response.status = 304;
  }
  if (response.status != 304) response.body = std::move(answer.body);
  return response;
}

std::string in_brackets(const std::string& address) {
  return address.find(':') == address.npos ? address : "[" + address + "]";
}

}  // namespace

class Server::Implementation {
 public:
  explicit Implementation(const ServerOptions& options)
      : Implementation(options, listen_on(options.address, options.port)) {}

  int port() const { return port_; }
  const Access& access() const { return access_; }
  const std::string& address() const { return address_; }

 private:
  using Route = std::function<Answer(const HttpRequest&)>;

  Implementation(const ServerOptions& options, FileDescriptor listener)
      : address_(options.address),
        port_(port_of(listener)),
        access_(options.token.empty() ? random_token() : options.token, options.address, port_),
        catalog_(options.folders),
        routes_(make_routes()),
        server_(std::move(listener), {.limits = options.limits,
                                      .headers = security_headers(),
                                      .authorize = [this](const HttpRequest& request) { return authorize(request); },
                                      .handle = [this](const HttpRequest& request) { return handle(request); }}) {}

  bool has_parameter(const HttpRequest& request) const {
    const auto token = request.parameters.find("token");
    return token != request.parameters.end() && access_.is_token(token->second);
  }

  std::optional<HttpResponse> authorize(const HttpRequest& request) const {
    const auto refused = [](int status, const char* why) {
      return HttpResponse{.status = status, .content_type = kPlainText, .body = why};
    };
    if (!access_.is_own_host(request.header("host")))
      return refused(403, "This name is not one of the server's. Open the URL that lockstep ui has printed.\n");
    if (!has_parameter(request) && !access_.has_cookie(request.header("cookie")) &&
        !access_.has_bearer_token(request.header("authorization")))
      return refused(401, "The token is missing or wrong. Open the URL that lockstep ui has printed.\n");
    if (request.method != "GET" && request.method != "HEAD") {
      auto response = refused(405, "Only GET and HEAD are supported.\n");
      response.headers.emplace_back("Allow", "GET, HEAD");
      return response;
    }
    if (request.has_body) return refused(413, "A request must not have a body.\n");
    return std::nullopt;
  }

  HttpResponse handle(const HttpRequest& request) const {
    const auto route = routes_.find(request.path);
    auto response = response_to(request, route != routes_.end()
                                             ? route->second(request)
                                             : Answer{.status = 404, .content_type = kPlainText, .body = "404\n"});
    if (has_parameter(request)) response.headers.emplace_back("Set-Cookie", access_.cookie());
    return response;
  }

  /// The routes by path.
  std::map<std::string, Route, std::less<>> make_routes() const {
    std::map<std::string, Route, std::less<>> routes;
    for (const auto& file : page_files())
      routes.emplace(file.path, [&file](const HttpRequest&) {
        return Answer{.content_type = std::string(file.content_type), .body = std::string(file.content)};
      });
    routes["/"] = routes["/index.html"];
    routes["/api/runs"] = [this](const HttpRequest& request) {
      const auto tag = tag_of_runs(catalog_);
      const bool is_known = request.header("if-none-match") == "\"" + tag + "\"";
      return is_known ? Answer{.tag = tag} : answer_runs(catalog_);
    };
    const auto add = [&](const std::string& path, Answer (*answer)(const RunCatalog&, const Parameters&)) {
      routes[path] = [this, answer](const HttpRequest& request) { return answer(catalog_, request.parameters); };
    };
    add("/api/curves", answer_curves);
    add("/api/ranks", answer_ranks);
    add("/api/output", answer_output);
    add("/api/checkpoints", answer_checkpoints);
    routes["/metrics"] = [this](const HttpRequest&) { return answer_open_metrics(catalog_); };
    return routes;
  }

  const std::string address_;
  const int port_;
  const Access access_;
  const RunCatalog catalog_;
  const std::map<std::string, Route, std::less<>> routes_;
  const HttpServer server_;  // last: its threads use the other members
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
