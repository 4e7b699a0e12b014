#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/export.h>
#include <lockstep/store.h>

namespace lockstep {

struct TcpStoreOptions {
  /// Name or address at which the store is reached. The hosting process listens at this address only.
  std::string host = "127.0.0.1";
  /// Port of the store. On the host, 0 lets the system choose a port; see port().
  int port = 0;
  /// Whether this object hosts the store or connects to it.
  bool is_host = false;
  /// File with the job's secret: 32 bytes or more, mode 0600. Only processes of the job may know the secret. Empty: see
  /// LOCKSTEP_SECRET_FILE in docs/environment.md.
  std::string secret_file{};
  /// Time limit for connecting.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

/// A store that one process hosts and other processes reach over TCP. Connections use TLS 1.3 with the job's secret, so
/// that no other process can read or write the store (docs/security.md). Thread-safe.
///
/// The constructor throws TimeoutError if no store listens at the address, PeerError if the other side has a different
/// secret, SystemError if the port is in use (the message names the process that uses it), and UsageError for an
/// invalid port. When the host is gone, every call throws PeerError.
class LOCKSTEP_EXPORT TcpStore final : public Store {
 public:
  explicit TcpStore(const TcpStoreOptions& options);
  ~TcpStore() override;

  int port() const;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;
  int64_t add(const std::string& key, int64_t amount) override;
  void append(const std::string& key, const std::string& value) override;
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override;
  std::vector<std::string> multi_get(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override;
  void multi_set(const std::vector<std::pair<std::string, std::string>>& values) override;
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override;
  bool check(const std::vector<std::string>& keys) override;
  bool erase(const std::string& key) override;

 private:
  struct Parts;
  std::unique_ptr<const Parts> parts_;  // constant after construction
};

}  // namespace lockstep
