#include "rendezvous/store/remote_store.h"

#include "base/deadline.h"
#include "rendezvous/store/key_table.h"

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

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    return client_->call(Verb::kCompareSet, {key, expected, desired}).at(0);
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

}  // namespace lockstep
