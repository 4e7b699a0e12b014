#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/export.h>

namespace lockstep {

/// A small table of keys and values that all ranks of a job see: where they meet before they can talk directly.
///
/// Thread-safe. A value is set whole or not at all; any bytes may stand in keys and values. Calls that wait take a
/// time-out and throw TimeoutError naming the keys that did not come.
class LOCKSTEP_EXPORT Store {
 public:
  virtual ~Store();

  virtual void set(const std::string& key, const std::string& value) = 0;

  /// The key's value, as soon as there is one.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;

  /// Adds to the key's number (a missing key counts as 0) and returns the sum.
  /// UsageError when the key holds something that is not a number.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;

  /// Sets the key to `desired` if its value is `expected`, where an empty `expected` also stands for a missing key.
  /// Returns the value that the key has afterwards (empty when it is missing still).
  virtual std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) = 0;

  /// Returns when every key has a value.
  virtual void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) = 0;

  /// Whether every key has a value now.
  virtual bool check(const std::vector<std::string>& keys) = 0;

  /// Removes the key; whether it was there.
  virtual bool erase(const std::string& key) = 0;

 protected:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
};

/// A store in memory, for ranks that are threads of one process.
LOCKSTEP_EXPORT std::shared_ptr<Store> make_memory_store();

/// A store in a file that all ranks can open, on one host or on a shared file system with POSIX locks. The first rank
/// creates the file, with mode 0600; it must not exist before the job. The last living rank to close the store removes
/// the file. A job whose ranks were all killed leaves it behind.
/// UsageError when the path leads to anything else than a store of this user that some rank has open: a link, a device,
/// another user's file, a file that others can open, a file of another program, a store of a job that has ended. Such a
/// file is neither changed nor removed. SystemError when the file cannot be created.
LOCKSTEP_EXPORT std::shared_ptr<Store> open_file_store(const std::string& path);

/// The same store with every key behind a prefix: parts that do not know each other cannot meet by accident.
LOCKSTEP_EXPORT std::shared_ptr<Store> with_prefix(std::shared_ptr<Store> store, std::string prefix);

}  // namespace lockstep
