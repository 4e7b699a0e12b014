#include "report/event_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "event files are little-endian");

// --- records

constexpr auto kCrcTable = [] {
  constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, its bits reversed
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    table[byte] = crc;
  }
  return table;
}();

template <class Number>
void add_number(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

void add_masked_crc(std::string& bytes, std::string_view of) {
  add_number(bytes, std::rotr(crc32c(of), 15) + 0xa282ead8u);
}

// --- names

constexpr std::string_view kPrefix = "events.out.tfevents.";
constexpr size_t kTimeDigits = 10;
constexpr int64_t kMaxTime = 9'999'999'999;

[[noreturn]] void fail_event_file(const char* call, const std::string& path) {
  throw SystemError(text(call, " ", path, ": ", std::strerror(errno),
                         "; TensorBoard's event files need a folder that this user can write to"));
}

// Not std::filesystem, of which some libraries export incompatible copies.
void make_event_folder(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const auto folder = path.substr(0, end);
    if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) fail_event_file("mkdir", folder);
    if (end == std::string::npos) return;
  }
}

/// The latest time in the name of an event file of the folder; 0 if it has none.
int64_t latest_time(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(folder.c_str()), ::closedir);
  if (!opened) fail_event_file("opendir", folder);
  int64_t latest = 0;
  while (const auto* entry = ::readdir(opened.get())) {
    std::string_view name = entry->d_name;
    if (!name.starts_with(kPrefix)) continue;
    name.remove_prefix(kPrefix.size());
    if (name.find('.') == kTimeDigits)
      latest = std::max(latest, parse_number<int64_t>(name.substr(0, kTimeDigits)).value_or(0));
  }
  return latest;
}

/// A path that sorts after the folder's other event files. Names begin with the time of their creation in seconds. For
/// a second file at the same time, or if another host's clock is ahead, the name has a later time.
std::string new_event_path(const std::string& folder, const std::string& suffix) {
  const auto time = std::min(std::max<int64_t>(std::time(nullptr), latest_time(folder) + 1), kMaxTime);
  auto digits = std::to_string(time);
  digits.insert(0, kTimeDigits - std::min(kTimeDigits, digits.size()), '0');
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  return text(folder, "/", kPrefix, digits, ".", host, ".", ::getpid(), suffix);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char byte : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

std::string to_record(std::string_view message) {
  std::string record;
  record.reserve(message.size() + 16);
  add_number(record, static_cast<uint64_t>(message.size()));
  add_masked_crc(record, record);
  record += message;
  add_masked_crc(record, message);
  return record;
}

// --- ProtoMessage

namespace {

constexpr int kVarintType = 0, kFixed64Type = 1, kBytesType = 2, kFixed32Type = 5;  // wire types

}  // namespace

void ProtoMessage::add_varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
  bytes_ += static_cast<char>(value);
}

void ProtoMessage::add_key(int field, int wire_type) {
  add_varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire_type));
}

ProtoMessage& ProtoMessage::add_int(int field, int64_t value) {
  add_key(field, kVarintType);
  add_varint(static_cast<uint64_t>(value));
  return *this;
}

ProtoMessage& ProtoMessage::add_float(int field, float value) {
  add_key(field, kFixed32Type);
  add_number(bytes_, value);
  return *this;
}

ProtoMessage& ProtoMessage::add_double(int field, double value) {
  add_key(field, kFixed64Type);
  add_number(bytes_, value);
  return *this;
}

ProtoMessage& ProtoMessage::add_doubles(int field, const std::vector<double>& values) {
  return add_bytes(field, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)});
}

ProtoMessage& ProtoMessage::add_bytes(int field, std::string_view bytes) {
  add_key(field, kBytesType);
  add_varint(bytes.size());
  bytes_ += bytes;
  return *this;
}

// --- EventFile

EventFile::EventFile(const std::string& folder, const std::string& suffix) {
  make_event_folder(folder);
  for (int tries = 0; !file_.is_open(); ++tries) {
    path_ = new_event_path(folder, suffix);
    file_ = FileDescriptor(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    // Another thread, or a process with this host name and number, may have been faster.
    if (!file_.is_open() && (errno != EEXIST || tries == 100)) fail_event_file("open", path_);
  }
}

EventFile::~EventFile() {
  if (!owner_.is_this()) return;  // the parent writes the rest
  if (!write_rest()) ++lost_;
  if (lost_ == 0) return;
  try {
    log_warning(text(path_, ": ", lost_, " records could not be written; TensorBoard does not show them"));
  } catch (const std::exception&) {
  }
}

/// Returns whether the last record is complete.
bool EventFile::write_rest() {
  while (!rest_.empty()) {
    const auto written = ::write(file_.get(), rest_.data(), rest_.size());
    if (written < 0 && errno != EINTR) return false;
    if (written > 0) rest_.erase(0, static_cast<size_t>(written));
  }
  return true;
}

/// Sets the warning for the first failure. The caller logs it without the mutex: the log's sink may use this file, too.
void EventFile::fail(const char* call, std::string& warning) {
  const int reason = errno;
  if (std::exchange(has_failed_, true)) return;
  warning =
      text(call, " ", path_, ": ", std::strerror(reason),
           "; training continues, but records for TensorBoard are lost until writing succeeds again. Check that the "
           "disk has space");
}

void EventFile::append(const ProtoMessage& message) {
  owner_.check("the process that created this TensorBoardWriter");
  std::string warning;
  {
    std::lock_guard lock(mutex_);
    if (!write_rest()) {
      fail("write", warning);
      ++lost_;
    } else {
      rest_ = to_record(message.bytes());
      const size_t size = rest_.size();
      if (!write_rest()) {
        fail("write", warning);
        if (rest_.size() == size) {  // the file has no part of the record
          rest_.clear();
          ++lost_;
        }
      }
    }
  }
  if (!warning.empty()) log_warning(warning);
}

void EventFile::sync() {
  owner_.check("the process that created this TensorBoardWriter");
  std::string warning;
  {
    std::lock_guard lock(mutex_);
    if (!write_rest()) fail("write", warning);
  }
  if (::fsync(file_.get()) != 0) {
    const int reason = errno;
    std::lock_guard lock(mutex_);
    errno = reason;
    fail("fsync", warning);
  }
  if (!warning.empty()) log_warning(warning);
}

}  // namespace lockstep::detail
