#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <lockstep/export.h>
#include <lockstep/store.h>

namespace lockstep {

struct TcpStoreOptions {
  /// The name or address of the host that has the store; the host listens at this address and at no other.
  std::string host = "127.0.0.1";
  /// 0, for the one that hosts it: the system chooses, and port() tells.
  int port = 0;
  /// Whether this object hosts the store, or connects to the one that does.
  bool is_host = false;
  /// A file (32 bytes or more, mode 0600) with what the processes of the job know and nobody else. Empty: see
  /// LOCKSTEP_SECRET_FILE in docs/environment.md.
  std::string secret_file{};
  /// For connecting.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// A store that one process hosts and others reach over TCP: TLS 1.3 with the job's secret, so that nobody else can
/// read or write it (docs/security.md). Thread-safe.
///
/// Construction throws TimeoutError when nobody listens there, PeerError when the other side has another secret,
/// SystemError when the port is taken, naming by whom. Once the host is gone every call throws PeerError.
class LOCKSTEP_EXPORT TcpStore final : public Store {
 public:
  explicit TcpStore(const TcpStoreOptions& options);
  ~TcpStore() override;

  int port() const;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;
  int64_t add(const std::string& key, int64_t amount) override;
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override;
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override;
  bool check(const std::vector<std::string>& keys) override;
  bool erase(const std::string& key) override;

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;  // constant after construction
};

}  // namespace lockstep
