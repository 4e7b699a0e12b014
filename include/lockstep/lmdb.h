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
      true;  ///< Let the system read beyond what is asked. False for random access to more than memory holds.
};

/// The records of an LMDB database, in the order of their keys. They are read through the file's pages in memory, which
/// all processes on a host share. Copies share the open file. Thread-safe.
///
/// No lock is taken, so any number of ranks may read, also from a file system that cannot be written: the database must
/// not change meanwhile. A database is trusted, as LMDB itself trusts it; one that was cut short is refused, though.
///
/// Throws UsageError for a path that is no database, and where lockstep was built without LMDB.
class LOCKSTEP_EXPORT LmdbReader {
 public:
  /// A file, or a folder with a data.mdb in it. One whose keys are not those of LmdbWriter has all its keys read at
  /// once.
  explicit LmdbReader(const std::filesystem::path& path, LmdbOptions options = {});
  ~LmdbReader();
  LmdbReader(const LmdbReader&) = default;
  LmdbReader& operator=(const LmdbReader&) = default;

  size_t size() const;

  /// Calls `use` with a record, whose bytes are valid in the call alone. Throws UsageError for an index past the end.
  void read(size_t index, const std::function<void(std::string_view key, std::string_view value)>& use) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// The sample that LmdbWriter::add wrote.
LOCKSTEP_EXPORT torch::data::Example<> example_of_record(std::string_view key, std::string_view value);

/// The records of an LMDB database as samples, for DataLoader. `decode(key, value)` makes a sample of a record, on the
/// threads of the workers; without one the records are LmdbWriter's Examples. Copies share the open file.
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

/// Writes an LMDB database: a file beside the place where it will be, which takes its name with finish(). One thread at
/// a time may use it.
class LOCKSTEP_EXPORT LmdbWriter {
 public:
  /// Throws UsageError if `file` exists already, or where lockstep was built without LMDB.
  explicit LmdbWriter(std::filesystem::path file);
  /// Without finish() nothing is left.
  ~LmdbWriter();
  LmdbWriter(const LmdbWriter&) = delete;
  LmdbWriter& operator=(const LmdbWriter&) = delete;

  /// A record, under the next number as its key: eight bytes, the largest first. At most 4 GiB.
  void add(std::string_view value);

  /// A record that LmdbDataset reads by itself: safetensors with `data` and, if it is defined, `target`.
  void add(const torch::data::Example<>& sample);

  size_t size() const;

  /// Everything is on disk, under its name, when this returns. Then nothing can be added any more.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
