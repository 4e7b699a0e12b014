#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/error.h>

#include "base/file_descriptor.h"

// Reading and writing of files that may be large, damaged or hostile.

namespace lockstep::detail {

/// Bytes that can be read at any position. Thread-safe.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual uint64_t size() const = 0;
  /// Throws CheckpointError if the range exceeds the bytes, SystemError if reading fails.
  virtual void read(uint64_t offset, void* to, size_t size) const = 0;

  std::string read(uint64_t offset, size_t size) const;
};

/// A regular file. Reads with pread: a mapped file would end the process if another process truncated it.
class FileSource : public ByteSource {
 public:
  /// Throws CheckpointError if there is no such file or it is not a regular file, SystemError if it cannot be opened.
  explicit FileSource(const std::string& path);
  using ByteSource::read;
  uint64_t size() const override { return size_; }
  void read(uint64_t offset, void* to, size_t size) const override;

 private:
  const std::string path_;
  FileDescriptor file_;
  uint64_t size_ = 0;
};

class MemorySource : public ByteSource {
 public:
  explicit MemorySource(std::string_view bytes) : bytes_(bytes) {}
  using ByteSource::read;
  uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t offset, void* to, size_t size) const override;

 private:
  std::string_view bytes_;
};

/// Bytes that can be written at any position. write_at() is thread-safe.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  /// Call it once, before anything is written, with the number of bytes that will be.
  virtual void reserve(uint64_t size) = 0;
  virtual void write_at(uint64_t offset, const void* bytes, size_t size) = 0;
};

class MemorySink : public ByteSink {
 public:
  void reserve(uint64_t size) override { bytes_.resize(size); }
  void write_at(uint64_t offset, const void* bytes, size_t size) override;
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// A file is complete and has its name, but its folder could not be synced: a crash of the machine might lose it, and
/// leave a file that had the name before.
class NotDurable : public SystemError {
 public:
  using SystemError::SystemError;
};

/// A new file that appears under its name only when it is complete. commit() makes it durable: fsync, rename, fsync of
/// the folder. It throws NotDurable if only the last of these fails. Without commit() the destructor removes the file.
/// A process that dies leaves a file whose name begins with kTemporaryPrefix.
class AtomicFile : public ByteSink {
 public:
  static constexpr const char* kTemporaryPrefix = ".unfinished-";

  explicit AtomicFile(const std::string& path);
  ~AtomicFile() override;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Reserves space, so that a full disk is noticed before much is written.
  void reserve(uint64_t size) override;
  void write_at(uint64_t offset, const void* bytes, size_t size) override;
  void commit();

 private:
  const std::string path_;
  std::string temporary_;  // empty after commit()
  FileDescriptor file_;
};

/// Whether JSON text has more than `levels` levels of objects and lists. Each object and list takes much more memory
/// than the byte that opens it.
bool is_json_deeper_than(int levels, std::string_view json);

/// Writes a whole file through an AtomicFile. Only warns if the folder cannot be synced.
void replace_file(const std::string& path, const std::string& content);

/// Throws SystemError: "call path: reason".
[[noreturn]] void fail_file(const char* call, const std::string& path);

/// Creates the folder and its parent folders if they are missing, and makes their names durable.
void make_folders(const std::string& path);
/// Makes new and changed names in the folder durable.
void sync_folder(const std::string& folder);
/// Returns the folder of a path: "." if the path has none.
std::string folder_of(const std::string& path);

/// Calls body(0) ... body(count - 1) on several threads, this one included, and returns when all are done. Rethrows the
/// first exception; calls that have not begun by then are left out.
void for_each_in_parallel(size_t count, size_t threads, const std::function<void(size_t)>& body);

/// The number of threads for checkpoint files: that of LibTorch's operations.
size_t file_threads();

}  // namespace lockstep::detail
