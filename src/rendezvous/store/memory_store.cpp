#include <condition_variable>
#include <mutex>

#include <lockstep/store.h>

#include "base/deadline.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "rendezvous/store/key_table.h"

namespace lockstep {

Store::~Store() = default;

std::vector<std::string> Store::all_gather(const std::string& key, int rank, int size, const std::string& value,
                                           std::chrono::milliseconds timeout) {
  set(text(key, '/', rank), value);
  std::vector<std::string> keys;
  for (int r = 0; r < size; ++r) keys.push_back(text(key, '/', r));
  return multi_get(keys, timeout);
}

namespace {

class MemoryStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    table_.set(key, value);
    changed_.notify_all();
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    wait_locked(lock, {key}, timeout);
    return *table_.find(key);
  }

  int64_t add(const std::string& key, int64_t amount) override {
    std::lock_guard lock(mutex_);
    int64_t sum = table_.sum(key, amount);
    table_.set(key, std::to_string(sum));
    changed_.notify_all();
    return sum;
  }

  void append(const std::string& key, const std::string& value) override {
    std::lock_guard lock(mutex_);
    table_.append(key, value);
    changed_.notify_all();
  }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    std::lock_guard lock(mutex_);
    if (table_.matches(key, expected)) {
      table_.set(key, desired);
      changed_.notify_all();
    }
    return table_.find(key).value_or("");
  }

  std::vector<std::string> multi_get(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    wait_locked(lock, keys, timeout);
    return table_.values(keys);
  }

  void multi_set(const std::vector<std::pair<std::string, std::string>>& values) override {
    std::lock_guard lock(mutex_);
    for (const auto& [key, value] : values) table_.set(key, value);
    changed_.notify_all();
  }

  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    wait_locked(lock, keys, timeout);
  }

  bool check(const std::vector<std::string>& keys) override {
    std::lock_guard lock(mutex_);
    return table_.missing(keys).empty();
  }

  bool erase(const std::string& key) override {
    std::lock_guard lock(mutex_);
    return table_.erase(key);
  }

 private:
  void wait_locked(std::unique_lock<std::mutex>& lock, const std::vector<std::string>& keys,
                   std::chrono::milliseconds timeout) {
    auto deadline = deadline_after(timeout);
    if (!changed_.wait_until(lock, deadline, [&] { return table_.missing(keys).empty(); }))
      throw_keys_late(table_.missing(keys), timeout.count());
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  KeyTable table_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> make_memory_store() {
  return make_shared_owned<MemoryStore>();
}

}  // namespace lockstep
