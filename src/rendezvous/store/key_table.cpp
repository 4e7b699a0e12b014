#include "rendezvous/store/key_table.h"

#include <charconv>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

std::optional<std::string> KeyTable::find(const std::string& key) const {
  auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> KeyTable::values(const std::vector<std::string>& keys) const {
  std::vector<std::string> result;
  result.reserve(keys.size());
  for (const auto& key : keys) result.push_back(values_.at(key));
  return result;
}

size_t KeyTable::bytes(const std::vector<std::string>& keys) const {
  size_t sum = 0;
  for (const auto& key : keys)
    if (auto found = values_.find(key); found != values_.end()) sum += found->second.size();
  return sum;
}

int64_t KeyTable::sum(const std::string& key, int64_t amount) const {
  auto value = find(key);
  if (!value) return amount;
  int64_t number = 0;
  auto [end, status] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (status != std::errc() || end != value->data() + value->size())
    throw UsageError(text("store: cannot add to key '", key, "': its value '", *value, "' is not a number"));
  int64_t sum = 0;
  if (__builtin_add_overflow(number, amount, &sum))
    throw UsageError(text("store: cannot add ", amount, " to key '", key, "', whose value is ", number,
                          ": the sum does not fit into 64 bits"));
  return sum;
}

bool KeyTable::matches(const std::string& key, const std::string& expected) const {
  auto value = find(key);
  return value ? *value == expected : expected.empty();
}

std::vector<std::string> KeyTable::missing(const std::vector<std::string>& keys) const {
  std::vector<std::string> result;
  for (const auto& key : keys)
    if (!values_.contains(key)) result.push_back(key);
  return result;
}

void throw_keys_late(const std::vector<std::string>& keys, int64_t waited_ms) {
  throw TimeoutError(text("store: timed out after ", waited_ms, " ms; no value for ", enumerate(keys)));
}

}  // namespace lockstep
