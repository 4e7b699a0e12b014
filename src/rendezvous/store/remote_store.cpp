#include "rendezvous/store/remote_store.h"

#include "base/deadline.h"
#include "rendezvous/store/key_table.h"

namespace lockstep {
namespace {

class LineStore final : public Store {
 public:
  explicit LineStore(std::shared_ptr<Line> line) : line_(std::move(line)) {}

  void set(const std::string& key, const std::string& value) override { line_->call(Verb::kSet, {key, value}); }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    return wait_for({key}, timeout).at(0);
  }

  int64_t add(const std::string& key, int64_t amount) override {
    return to_number(line_->call(Verb::kAdd, {key, std::to_string(amount)}).at(0));
  }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    return line_->call(Verb::kCompareSet, {key, expected, desired}).at(0);
  }

  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    wait_for(keys, timeout);
  }

  bool check(const std::vector<std::string>& keys) override { return line_->call(Verb::kCheck, keys).at(0) == "1"; }

  bool erase(const std::string& key) override { return line_->call(Verb::kErase, {key}).at(0) == "1"; }

 private:
  Line::Fields wait_for(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
    Line::Fields late;
    auto values = line_->call(Verb::kGet, keys, deadline_after(timeout), late);
    if (!values) throw_keys_late(late, timeout.count());
    return *values;
  }

  const std::shared_ptr<Line> line_;
};

}  // namespace

std::shared_ptr<Store> make_line_store(std::shared_ptr<Line> line) {
  return std::make_shared<LineStore>(std::move(line));
}

}  // namespace lockstep
