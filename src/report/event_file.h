#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_descriptor.h"
#include "base/owner_process.h"

// TensorBoard's event files: records that each hold one protocol buffer message, an Event.

namespace lockstep::detail {

/// CRC-32C (Castagnoli).
uint32_t crc32c(std::string_view bytes);

/// The bytes of a record: length (uint64), masked CRC of the length, message, masked CRC of the message. A masked CRC
/// is rotated by 15 bits plus a constant: the CRC of bytes that contain their own CRC would be useless.
std::string to_record(std::string_view message);

/// Serializes a protocol buffer message. Fields are written in the order of the calls.
class ProtoMessage {
 public:
  ProtoMessage& add_int(int field, int64_t value);  // int32, int64, enum
  ProtoMessage& add_float(int field, float value);
  ProtoMessage& add_double(int field, double value);
  ProtoMessage& add_doubles(int field, const std::vector<double>& values);  // repeated double
  ProtoMessage& add_bytes(int field, std::string_view bytes);               // string, bytes
  ProtoMessage& add_message(int field, const ProtoMessage& message) { return add_bytes(field, message.bytes_); }

  const std::string& bytes() const { return bytes_; }

 private:
  void add_varint(uint64_t value);
  void add_key(int field, int wire_type);
  void add_raw(const void* bytes, size_t size) { bytes_.append(static_cast<const char*>(bytes), size); }

  std::string bytes_;
};

/// A new event file, to which whole records are appended. Thread-safe.
///
/// Readers remember a record of which they have seen the beginning. A record that was written in part, for example
/// until the disk was full, is therefore never removed: its rest is written before the next record.
class EventFile {
 public:
  /// Creates the folder and the file. Throws SystemError.
  EventFile(const std::string& folder, const std::string& suffix);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  /// Drops the message if it cannot be written. Logs a warning the first time. Throws UsageError in a forked child.
  void append(const ProtoMessage& message);
  void sync();
  const std::string& path() const { return path_; }

 private:
  bool write_rest();
  void fail(const char* call, std::string& warning);

  const OwnerProcess owner_{};
  std::string path_;     // constant after construction
  FileDescriptor file_;  // constant after construction
  std::mutex mutex_;
  std::string rest_;         // of the last record; guarded by mutex_
  int64_t lost_ = 0;         // records; guarded by mutex_
  bool has_failed_ = false;  // guarded by mutex_
};

}  // namespace lockstep::detail
