#include "rendezvous/store/tcp_store.h"

#include <lockstep/error.h>
#include <lockstep/tcp_store.h>

#include "base/deadline.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/store/key_table.h"
#include "rendezvous/store/store_server.h"

namespace lockstep {
namespace {

class RemoteStore final : public Store {
 public:
  explicit RemoteStore(std::shared_ptr<StoreClient> client) : client_(std::move(client)) {}

  void set(const std::string& key, const std::string& value) override { client_->call(Verb::kSet, {key, value}); }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    return wait_for({key}, timeout).at(0);
  }

  int64_t add(const std::string& key, int64_t amount) override {
    return to_number(client_->call(Verb::kAdd, {key, std::to_string(amount)}).at(0));
  }

  void append(const std::string& key, const std::string& value) override { client_->call(Verb::kAppend, {key, value}); }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    return client_->call(Verb::kCompareSet, {key, expected, desired}).at(0);
  }

  std::vector<std::string> multi_get(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    return wait_for(keys, timeout);
  }

  void multi_set(const std::vector<std::pair<std::string, std::string>>& values) override {
    StoreClient::Fields fields;
    fields.reserve(2 * values.size());
    for (const auto& [key, value] : values) {
      fields.push_back(key);
      fields.push_back(value);
    }
    client_->call(Verb::kMultiSet, std::move(fields));
  }

  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    wait_for(keys, timeout);
  }

  bool check(const std::vector<std::string>& keys) override { return client_->call(Verb::kCheck, keys).at(0) == "1"; }

  bool erase(const std::string& key) override { return client_->call(Verb::kErase, {key}).at(0) == "1"; }

 private:
  StoreClient::Fields wait_for(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
    StoreClient::Fields late;
    auto values = client_->call(Verb::kGet, keys, deadline_after(timeout), late);
    if (!values) throw_keys_late(late, timeout.count());
    return *values;
  }

  const std::shared_ptr<StoreClient> client_;
};

}  // namespace

std::shared_ptr<Store> make_remote_store(std::shared_ptr<StoreClient> client) {
  return std::make_shared<RemoteStore>(std::move(client));
}

namespace {

Secret secret_of(const TcpStoreOptions& options) {
  if (options.port < (options.is_host ? 0 : 1) || options.port > 65535)
    throw UsageError(
        text("TcpStore: port is ", options.port,
             options.is_host ? "; it must be from 0 to 65535" : "; it must be the host's port, from 1 to 65535"));
  if (!options.secret_file.empty()) return Secret::from_file(options.secret_file);
  return find_secret(is_loopback(options.host), process_variable);
}

}  // namespace

/// In order of construction, so that the connection is destroyed before the host.
struct TcpStore::Parts {
  Secret secret;
  std::unique_ptr<StoreServer> host;
  int port;
  std::shared_ptr<Store> store;
  OwnerProcess owner{};
};

TcpStore::TcpStore(const TcpStoreOptions& options)
    : parts_([&] {
        auto secret = secret_of(options);
        std::unique_ptr<StoreServer> host;
        if (options.is_host)
          host = std::make_unique<StoreServer>(
              StoreServer::Options{{options.host, options.port}, secret, 0, "another process"});
        int port = host ? host->port() : options.port;
        auto client = make_shared_owned<StoreClient>(
            StoreClient::Options{{options.host, port}, secret.key(0), 0, deadline_after(options.timeout)});
        return new Parts{std::move(secret), std::move(host), port, make_remote_store(std::move(client))};
      }()) {}

TcpStore::~TcpStore() {
  if (!parts_->owner.is_this()) abandon(parts_.release());
}

int TcpStore::port() const {
  return parts_->port;
}

void TcpStore::set(const std::string& key, const std::string& value) {
  parts_->store->set(key, value);
}

std::string TcpStore::get(const std::string& key, std::chrono::milliseconds timeout) {
  return parts_->store->get(key, timeout);
}

int64_t TcpStore::add(const std::string& key, int64_t amount) {
  return parts_->store->add(key, amount);
}

void TcpStore::append(const std::string& key, const std::string& value) {
  parts_->store->append(key, value);
}

std::string TcpStore::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  return parts_->store->compare_set(key, expected, desired);
}

std::vector<std::string> TcpStore::multi_get(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  return parts_->store->multi_get(keys, timeout);
}

void TcpStore::multi_set(const std::vector<std::pair<std::string, std::string>>& values) {
  parts_->store->multi_set(values);
}

void TcpStore::wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  parts_->store->wait(keys, timeout);
}

bool TcpStore::check(const std::vector<std::string>& keys) {
  return parts_->store->check(keys);
}

bool TcpStore::erase(const std::string& key) {
  return parts_->store->erase(key);
}

}  // namespace lockstep
