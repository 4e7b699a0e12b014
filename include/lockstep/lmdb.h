#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include <torch/data/example.h>
#include <torch/types.h>

#include <lockstep/export.h>

namespace lockstep {

struct LmdbOptions {
  bool read_ahead =
      true;  ///< Let the kernel read ahead. Set to false for random access to a database larger than memory.
};

/// Reads the records of an LMDB database, in the order of their keys. The file is memory-mapped; all processes on a
/// host share its pages. Copies share the open file. Thread-safe.
///
/// Takes no lock, so any number of ranks may read, also on a read-only file system. The database must not change while
/// it is open. The contents are trusted, as LMDB itself trusts them, but a truncated file is refused, and a record that
/// reaches beyond the end of the file.
///
/// Throws UsageError if the path is not a database or if lockstep was built without LMDB, and SystemError if a system
/// call fails.
class LOCKSTEP_EXPORT LmdbReader {
 public:
  /// Opens a file, or a directory that contains data.mdb. Reads all keys when opening, unless LmdbWriter wrote the
  /// database.
  explicit LmdbReader(const std::filesystem::path& path, LmdbOptions options = {});
  ~LmdbReader();
  LmdbReader(const LmdbReader&) = default;
  LmdbReader& operator=(const LmdbReader&) = default;

  size_t size() const;

  /// Calls `use` with a record. The bytes are valid only during the call. Throws UsageError if `index` is out of range.
  void read(size_t index, const std::function<void(std::string_view key, std::string_view value)>& use) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Decodes a sample that LmdbWriter::add(Example) wrote.
LOCKSTEP_EXPORT torch::data::Example<> example_of_record(std::string_view key, std::string_view value);

/// A dataset of LMDB records, for DataLoader. `decode(key, value)` converts a record to a sample, on the worker
/// threads. Without `decode`, records must be the Examples that LmdbWriter wrote. Copies share the open file.
template <class Sample = torch::data::Example<>>
class LmdbDataset {
 public:
  explicit LmdbDataset(const std::filesystem::path& path,
                       LmdbOptions options = {}) requires std::is_same_v<Sample, torch::data::Example<>>
      : LmdbDataset(path, example_of_record, options) {}
  template <class Function>
  requires std::is_invocable_r_v<Sample, Function&, std::string_view, std::string_view> LmdbDataset(
      const std::filesystem::path& path, Function decode, LmdbOptions options = {})
      : reader_(path, options), decode_(std::move(decode)) {}

  Sample get(size_t index) const {
    std::optional<Sample> sample;
    reader_.read(index, [&](std::string_view key, std::string_view value) { sample.emplace(decode_(key, value)); });
    return std::move(*sample);
  }
  torch::optional<size_t> size() const { return reader_.size(); }

 private:
  LmdbReader reader_;
  std::function<Sample(std::string_view key, std::string_view value)> decode_;
};

template <class Decode>
requires std::is_invocable_v<Decode&, std::string_view, std::string_view> LmdbDataset(std::filesystem::path, Decode,
                                                                                      LmdbOptions = {})
->LmdbDataset<std::invoke_result_t<Decode&, std::string_view, std::string_view>>;

/// Writes an LMDB database. Records go to a temporary file in the same directory; finish() renames it to `file`. Not
/// thread-safe.
class LOCKSTEP_EXPORT LmdbWriter {
 public:
  /// Throws UsageError if `file` already exists or if lockstep was built without LMDB.
  explicit LmdbWriter(std::filesystem::path file);
  /// Removes the temporary file unless finish() was called.
  ~LmdbWriter();
  LmdbWriter(const LmdbWriter&) = delete;
  LmdbWriter& operator=(const LmdbWriter&) = delete;

  /// Adds a record of at most 4 GiB. Its key is the next number, as eight bytes in big-endian order.
  void add(std::string_view value);

  /// Adds a record that LmdbDataset decodes by default: safetensors with `data` and, if defined, `target`.
  void add(const torch::data::Example<>& sample);

  size_t size() const;

  /// Makes the database durable on disk under its final name. After that nothing can be added. Throws SystemError on
  /// failure; if only the rename failed, the message names the temporary file, which stays.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
