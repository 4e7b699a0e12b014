#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace lockstep {

/// The semantics of the store operations, without locks, waiting or transport. Every store implementation uses it. Not
/// thread-safe.
class KeyTable {
 public:
  void set(const std::string& key, const std::string& value) { values_[key] = value; }
  void append(const std::string& key, const std::string& value) { values_[key] += value; }
  bool erase(const std::string& key) { return values_.erase(key) > 0; }
  void erase_all(const std::string& prefix) {
    std::erase_if(values_, [&](const auto& entry) { return entry.first.starts_with(prefix); });
  }
  size_t size() const { return values_.size(); }

  bool contains(const std::string& key) const { return values_.contains(key); }
  std::optional<std::string> find(const std::string& key) const;
  /// Returns the values of the keys, in their order. Every key must have a value.
  std::vector<std::string> values(const std::vector<std::string>& keys) const;
  /// Returns the number of bytes that values() would return, without a copy. A missing key counts as empty.
  size_t bytes(const std::vector<std::string>& keys) const;

  /// Returns the sum that add() would store. Throws UsageError if the value is not a number or the sum overflows.
  int64_t sum(const std::string& key, int64_t amount) const;

  /// Returns whether compare_set() would set the key.
  bool matches(const std::string& key, const std::string& expected) const;

  /// Returns the keys that have no value.
  std::vector<std::string> missing(const std::vector<std::string>& keys) const;

 private:
  std::unordered_map<std::string, std::string> values_;
};

/// Throws TimeoutError, naming the keys that have no value.
[[noreturn]] void throw_keys_late(const std::vector<std::string>& keys, int64_t waited_ms);

}  // namespace lockstep
