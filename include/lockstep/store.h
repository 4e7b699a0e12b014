#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/export.h>

namespace lockstep {

/// A key-value table that all ranks of a job share. Ranks use it to exchange addresses before they can connect.
///
/// Thread-safe. Every call is atomic: other ranks see all of its effect or none. Keys and values may contain any bytes.
/// Calls that block take a time-out and throw TimeoutError, which names the missing keys; the store still works. A
/// custom store implements all pure virtual functions.
class LOCKSTEP_EXPORT Store {
 public:
  virtual ~Store();

  virtual void set(const std::string& key, const std::string& value) = 0;

  /// Blocks until the key has a value and returns it.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;

  /// Adds `amount` to the key's number and returns the sum. A missing key counts as 0. Throws UsageError if the value
  /// is not a number.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;

  /// Appends `value` to the key's value. A missing key counts as empty. Over TCP the result is limited to 64 MiB;
  /// throws UsageError beyond.
  virtual void append(const std::string& key, const std::string& value) = 0;

  /// Sets the key to `desired` if its value is `expected`. An empty `expected` also matches a missing key. Returns the
  /// key's value after the call, or an empty string if the key is still missing.
  virtual std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) = 0;

  /// Blocks until every key has a value and returns the values in the order of the keys. All values are of one moment.
  /// Over TCP this is one request; throws UsageError if the values together exceed 64 MiB.
  virtual std::vector<std::string> multi_get(const std::vector<std::string>& keys,
                                             std::chrono::milliseconds timeout) = 0;

  /// Sets all keys at once. If a key occurs several times, its last value counts. Over TCP this is one request; throws
  /// UsageError if keys and values together exceed 64 MiB.
  virtual void multi_set(const std::vector<std::pair<std::string, std::string>>& values) = 0;

  /// Blocks until every key has a value.
  virtual void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) = 0;

  /// Returns whether every key has a value.
  virtual bool check(const std::vector<std::string>& keys) = 0;

  /// Removes the key and returns whether it existed.
  virtual bool erase(const std::string& key) = 0;

  /// Sets "`key`/`rank`" to `value` and returns the values of ranks 0 to `size` - 1. Collective: every rank calls it
  /// once with the same `key` and `size`. Throws TimeoutError if a rank does not call it in time.
  std::vector<std::string> all_gather(const std::string& key, int rank, int size, const std::string& value,
                                      std::chrono::milliseconds timeout);

 protected:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
};

/// Returns a store in memory, for ranks that are threads of one process.
LOCKSTEP_EXPORT std::shared_ptr<Store> make_memory_store();

/// Opens a store in a file that all ranks can access, on one host or on a shared file system with POSIX locks. The
/// first rank creates the file with mode 0600; it must not exist before the job. The last rank that closes the store
/// removes the file. If all ranks are killed, the file stays.
///
/// The path must not exist, or must be a store that belongs to this user and that some rank has open. Otherwise throws
/// UsageError: a link, a device, another user's file, a file with permissions for others, a file of another program and
/// a store of a finished job are refused, and neither changed nor removed. Throws SystemError if the file cannot be
/// created.
LOCKSTEP_EXPORT std::shared_ptr<Store> open_file_store(const std::string& path);

/// Returns a view of the store that adds a prefix to every key, so that independent users of one store do not collide.
LOCKSTEP_EXPORT std::shared_ptr<Store> with_prefix(std::shared_ptr<Store> store, std::string prefix);

}  // namespace lockstep
