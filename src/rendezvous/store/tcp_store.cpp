#include <lockstep/tcp_store.h>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/store/remote_store.h"
#include "rendezvous/store/store_server.h"

namespace lockstep {
namespace {

Secret secret_of(const TcpStoreOptions& options) {
  if (options.port < (options.is_host ? 0 : 1) || options.port > 65535)
    throw UsageError(
        text("TcpStore: port is ", options.port,
             options.is_host ? "; it must be from 0 to 65535" : "; it must be the host's, from 1 to 65535"));
  if (!options.secret_file.empty()) return Secret::from_file(options.secret_file);
  return find_secret(is_loopback(options.host), process_variable);
}

}  // namespace

/// In the order in which they are made; the connection goes before the host.
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

std::string TcpStore::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  return parts_->store->compare_set(key, expected, desired);
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
