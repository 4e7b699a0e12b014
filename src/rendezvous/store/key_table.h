#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace lockstep {

/// The meaning of a store's operations, without locks, waiting or transport: every store applies them through this.
class KeyTable {
 public:
  void set(const std::string& key, const std::string& value) { values_[key] = value; }
  bool erase(const std::string& key) { return values_.erase(key) > 0; }

  bool contains(const std::string& key) const { return values_.contains(key); }
  std::optional<std::string> find(const std::string& key) const;

  /// The sum that add() would store.
  int64_t sum(const std::string& key, int64_t amount) const;

  /// Whether compare_set() would set the key.
  bool matches(const std::string& key, const std::string& expected) const;

  /// Those of `keys` that have no value.
  std::vector<std::string> missing(const std::vector<std::string>& keys) const;

 private:
  std::unordered_map<std::string, std::string> values_;
};

/// Throws TimeoutError: the keys did not come.
[[noreturn]] void throw_keys_late(const std::vector<std::string>& keys, int64_t waited_ms);

}  // namespace lockstep
