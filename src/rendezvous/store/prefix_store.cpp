#include <lockstep/store.h>

namespace lockstep {
namespace {

class PrefixStore final : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(prefix_ + key, value); }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    return store_->get(prefix_ + key, timeout);
  }

  int64_t add(const std::string& key, int64_t amount) override { return store_->add(prefix_ + key, amount); }

  void append(const std::string& key, const std::string& value) override { store_->append(prefix_ + key, value); }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    return store_->compare_set(prefix_ + key, expected, desired);
  }

  std::vector<std::string> multi_get(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    return store_->multi_get(prefixed(keys), timeout);
  }

  void multi_set(const std::vector<std::pair<std::string, std::string>>& values) override {
    auto changed = values;
    for (auto& [key, value] : changed) key.insert(0, prefix_);
    store_->multi_set(changed);
  }

  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    store_->wait(prefixed(keys), timeout);
  }

  bool check(const std::vector<std::string>& keys) override { return store_->check(prefixed(keys)); }

  bool erase(const std::string& key) override { return store_->erase(prefix_ + key); }

 private:
  std::vector<std::string> prefixed(const std::vector<std::string>& keys) const {
    std::vector<std::string> result;
    for (const auto& key : keys) result.push_back(prefix_ + key);
    return result;
  }

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
};

}  // namespace

std::shared_ptr<Store> with_prefix(std::shared_ptr<Store> store, std::string prefix) {
  return std::make_shared<PrefixStore>(std::move(store), std::move(prefix));
}

}  // namespace lockstep
