#include "checkpoint/zip.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "zip files are little-endian");

constexpr uint32_t kHeaderMark = 0x04034b50, kEntryMark = 0x02014b50, kEndMark = 0x06054b50;
constexpr uint32_t kEnd64Mark = 0x06064b50, kLocator64Mark = 0x07064b50;
constexpr size_t kHeaderBytes = 30, kEntryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20;
constexpr size_t kMaxComment = 0xffff;
constexpr uint16_t kExtra64 = 1;
constexpr uint16_t kExtraPadding = 0x4246;  // "FB", as in PyTorch's own files
constexpr uint16_t kSizesFollow = 8;        // flag: the header has no sizes
constexpr uint32_t kSee64 = 0xffffffff;
constexpr uint64_t kAlignment = 64;
constexpr uint16_t kFirstOfJanuary1980 = 0x21;

template <class... Parts>
[[noreturn]] void refuse_zip(const Parts&... parts) {
  throw CheckpointError(text(parts..., ": the file is damaged, or not a PyTorch file"));
}

/// Reads fields of a header one after the other.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  T take() {
    if (bytes_.size() < sizeof(T)) refuse_zip("a zip header ends early");
    T value;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return value;
  }
  std::string_view take(size_t size) {
    if (bytes_.size() < size) refuse_zip("a zip header ends early");
    const auto taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }
  void skip(size_t size) { take(size); }
  bool is_empty() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

struct Directory {
  uint64_t begin = 0, size = 0, entries = 0;
  uint64_t end = 0;  // of the file's records and directory
};

/// Finds the directory through the fields at the end of the file.
Directory find_directory(const ByteSource& source) {
  const uint64_t all = source.size();
  if (all < kEndBytes) refuse_zip("the file has ", all, " bytes, expected at least ", kEndBytes);
  const auto tail_size = static_cast<size_t>(std::min<uint64_t>(all, kEndBytes + kMaxComment));
  const auto tail = source.read(all - tail_size, tail_size);
  size_t at = tail_size - kEndBytes;
  for (;; --at) {
    uint32_t mark = 0;
    uint16_t comment = 0;
    std::memcpy(&mark, tail.data() + at, sizeof(mark));
    std::memcpy(&comment, tail.data() + at + kEndBytes - sizeof(comment), sizeof(comment));
    if (mark == kEndMark && at + kEndBytes + comment == tail_size) break;
    if (at == 0) refuse_zip("the end of a zip file is missing");
  }
  const uint64_t end = all - tail_size + at;
  Fields fields(std::string_view(tail).substr(at, kEndBytes));
  fields.skip(10);
  Directory directory;
  directory.entries = fields.take<uint16_t>();
  directory.size = fields.take<uint32_t>();
  directory.begin = fields.take<uint32_t>();
  directory.end = end;
  if (end < kLocator64Bytes) return directory;
  const auto locator = source.read(end - kLocator64Bytes, kLocator64Bytes);
  Fields where(locator);
  if (where.take<uint32_t>() != kLocator64Mark) return directory;
  where.skip(4);
  const auto end64 = where.take<uint64_t>();
  if (end64 > end - kLocator64Bytes || end - kLocator64Bytes - end64 < kEnd64Bytes)
    refuse_zip("the zip64 end is at ", end64);
  const auto bytes = source.read(end64, kEnd64Bytes);
  Fields fields64(bytes);
  if (fields64.take<uint32_t>() != kEnd64Mark) refuse_zip("there is no zip64 end at ", end64);
  fields64.skip(28);
  directory.entries = fields64.take<uint64_t>();
  directory.size = fields64.take<uint64_t>();
  directory.begin = fields64.take<uint64_t>();
  directory.end = end64;
  return directory;
}

/// Replaces sizes that are stored in the 64-bit extra field.
void read_extra(std::string_view extra, std::initializer_list<uint64_t*> values, const std::string& name) {
  Fields fields(extra);
  while (!fields.is_empty()) {
    const auto id = fields.take<uint16_t>();
    const auto content = fields.take(fields.take<uint16_t>());
    if (id != kExtra64) continue;
    Fields sizes(content);
    for (auto* value : values)
      if (*value == kSee64) *value = sizes.take<uint64_t>();
    return;
  }
  for (const auto* value : values)
    if (*value == kSee64) refuse_zip("record '", name, "' has no 64-bit sizes");
}

ZipRecord read_entry(Fields& fields) {
  ZipRecord record;
  if (fields.take<uint32_t>() != kEntryMark) refuse_zip("the zip directory has an invalid entry");
  fields.skip(4);
  const auto flags = fields.take<uint16_t>();
  const auto method = fields.take<uint16_t>();
  fields.skip(4);
  record.crc = fields.take<uint32_t>();
  record.size = fields.take<uint32_t>();
  uint64_t full_size = fields.take<uint32_t>();
  const auto name_size = fields.take<uint16_t>();
  const auto extra_size = fields.take<uint16_t>();
  const auto comment_size = fields.take<uint16_t>();
  fields.skip(8);
  record.header = fields.take<uint32_t>();
  record.name = fields.take(name_size);
  read_extra(fields.take(extra_size), {&full_size, &record.size, &record.header}, record.name);
  fields.skip(comment_size);
  record.is_compressed = method != 0;
  if (flags & 1) refuse_zip("record '", record.name, "' is encrypted");
  if (!record.is_compressed && full_size != record.size)
    refuse_zip("record '", record.name, "' has sizes ", record.size, " and ", full_size);
  return record;
}

/// Reads the record's own header, which must agree with the directory. Header and data must end before `end`.
void find_data(const ByteSource& source, ZipRecord& record, uint64_t end) {
  if (record.header > end || end - record.header < kHeaderBytes)
    refuse_zip("record '", record.name, "' begins at ", record.header, ", expected an end before ", end);
  const auto bytes = source.read(record.header, kHeaderBytes);
  Fields fields(bytes);
  if (fields.take<uint32_t>() != kHeaderMark) refuse_zip("record '", record.name, "' has no header");
  fields.skip(2);
  const auto flags = fields.take<uint16_t>();
  const auto method = fields.take<uint16_t>();
  fields.skip(4);
  const auto crc = fields.take<uint32_t>();
  uint64_t size = fields.take<uint32_t>(), full_size = fields.take<uint32_t>();
  const auto name_size = fields.take<uint16_t>();
  const auto extra_size = fields.take<uint16_t>();
  const uint64_t names = record.header + kHeaderBytes;
  record.offset = names + name_size + extra_size;
  if (record.offset > end || end - record.offset < record.size)
    refuse_zip("record '", record.name, "' claims ", record.size, " bytes at ", record.offset,
               ", expected an end before ", end);
  const auto name = source.read(names, name_size);
  if (name != record.name || (method != 0) != record.is_compressed)
    refuse_zip("record '", record.name, "' has a header for '", name, "'");
  if (flags & kSizesFollow) return;
  const auto extra = source.read(names + name_size, extra_size);
  read_extra(extra, {&full_size, &size}, name);
  if (size != record.size || crc != record.crc)
    refuse_zip("record '", record.name, "' has two different sizes or checksums");
}

std::string padding(const ZipRecord& record, size_t extra64) {
  const uint64_t before = record.header + kHeaderBytes + record.name.size() + extra64;
  return std::string(record.offset - before, 'Z');
}

template <class T>
void put(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

bool is_large(uint64_t number) {
  return number >= kSee64;
}

size_t header_extra_bytes(const ZipRecord& record) {
  return is_large(record.size) ? 20 : 0;
}

size_t entry_extra_bytes(const ZipRecord& record) {
  const size_t numbers = (is_large(record.size) ? 2 : 0) + (is_large(record.header) ? 1 : 0);
  return numbers == 0 ? 0 : 4 + 8 * numbers;
}

/// The fields from the version to the sizes, which both headers have in common.
void put_common(std::string& bytes, const ZipRecord& record) {
  const bool is_64 = is_large(record.size) || is_large(record.header);
  put<uint16_t>(bytes, is_64 ? 45 : 20);  // needed version
  put<uint16_t>(bytes, 0);                // flags
  put<uint16_t>(bytes, 0);                // no compression
  put<uint16_t>(bytes, 0);
  put<uint16_t>(bytes, kFirstOfJanuary1980);
  put<uint32_t>(bytes, record.crc);
  const auto size = is_large(record.size) ? kSee64 : static_cast<uint32_t>(record.size);
  put<uint32_t>(bytes, size);
  put<uint32_t>(bytes, size);
  put<uint16_t>(bytes, static_cast<uint16_t>(record.name.size()));
}

}  // namespace

std::vector<ZipRecord> read_zip(const ByteSource& source) {
  const auto directory = find_directory(source);
  if (directory.begin > directory.end || directory.size > directory.end - directory.begin)
    refuse_zip("the zip directory is said to be at ", directory.begin, ", of ", directory.size, " bytes");
  if (directory.entries > directory.size / kEntryBytes)
    refuse_zip("the zip directory claims ", directory.entries, " records in ", directory.size, " bytes");
  const auto bytes = source.read(directory.begin, static_cast<size_t>(directory.size));
  Fields fields(bytes);
  std::vector<ZipRecord> records;
  for (uint64_t i = 0; i < directory.entries; ++i) records.push_back(read_entry(fields));
  if (!fields.is_empty()) refuse_zip("the zip directory has more bytes than entries");
  std::sort(records.begin(), records.end(), [](const ZipRecord& a, const ZipRecord& b) { return a.header < b.header; });
  std::set<std::string_view> names;
  for (size_t i = 0; i < records.size(); ++i) {
    // Each record ends before the next one begins, so no byte is read for two records.
    find_data(source, records[i], i + 1 < records.size() ? records[i + 1].header : directory.begin);
    if (!names.insert(records[i].name).second) refuse_zip("record '", records[i].name, "' occurs twice");
  }
  return records;
}

uint64_t lay_out_zip(std::vector<ZipRecord>& records) {
  uint64_t next = 0;
  for (auto& record : records) {
    record.header = next;
    const uint64_t least = next + kHeaderBytes + record.name.size() + header_extra_bytes(record) + 4;
    record.offset = (least + kAlignment - 1) / kAlignment * kAlignment;
    next = record.offset + record.size;
  }
  return next;
}

std::string zip_header(const ZipRecord& record) {
  std::string bytes;
  put(bytes, kHeaderMark);
  put_common(bytes, record);
  const size_t extra = header_extra_bytes(record);
  auto fill = padding(record, extra);
  put<uint16_t>(bytes, static_cast<uint16_t>(extra + fill.size()));
  bytes += record.name;
  if (extra > 0) {
    put<uint16_t>(bytes, kExtra64);
    put<uint16_t>(bytes, 16);
    put<uint64_t>(bytes, record.size);
    put<uint64_t>(bytes, record.size);
  }
  std::string mark;
  put<uint16_t>(mark, kExtraPadding);
  put<uint16_t>(mark, static_cast<uint16_t>(fill.size() - 4));
  fill.replace(0, mark.size(), mark);
  return bytes + fill;
}

std::string zip_directory(const std::vector<ZipRecord>& records, uint64_t begin) {
  std::string bytes;
  for (const auto& record : records) {
    put(bytes, kEntryMark);
    put<uint16_t>(bytes, 45);  // version that wrote the file
    put_common(bytes, record);
    const size_t extra = entry_extra_bytes(record);
    put<uint16_t>(bytes, static_cast<uint16_t>(extra));
    put<uint16_t>(bytes, 0);  // comment
    put<uint16_t>(bytes, 0);  // disk
    put<uint16_t>(bytes, 0);
    put<uint32_t>(bytes, 0);
    put<uint32_t>(bytes, is_large(record.header) ? kSee64 : static_cast<uint32_t>(record.header));
    bytes += record.name;
    if (extra == 0) continue;
    put<uint16_t>(bytes, kExtra64);
    put<uint16_t>(bytes, static_cast<uint16_t>(extra - 4));
    if (is_large(record.size)) {
      put<uint64_t>(bytes, record.size);
      put<uint64_t>(bytes, record.size);
    }
    if (is_large(record.header)) put<uint64_t>(bytes, record.header);
  }
  const uint64_t size = bytes.size(), end = begin + size;
  // Always with 64-bit fields: readers then do not depend on the marks for "see the 64-bit field".
  put(bytes, kEnd64Mark);
  put<uint64_t>(bytes, kEnd64Bytes - 12);
  put<uint16_t>(bytes, 45);
  put<uint16_t>(bytes, 45);
  put<uint32_t>(bytes, 0);
  put<uint32_t>(bytes, 0);
  put<uint64_t>(bytes, records.size());
  put<uint64_t>(bytes, records.size());
  put<uint64_t>(bytes, size);
  put<uint64_t>(bytes, begin);
  put(bytes, kLocator64Mark);
  put<uint32_t>(bytes, 0);
  put<uint64_t>(bytes, end);
  put<uint32_t>(bytes, 1);
  put(bytes, kEndMark);
  put<uint16_t>(bytes, 0);
  put<uint16_t>(bytes, 0);
  const auto count = static_cast<uint16_t>(std::min<size_t>(records.size(), 0xffff));
  put<uint16_t>(bytes, count);
  put<uint16_t>(bytes, count);
  put<uint32_t>(bytes, is_large(size) ? kSee64 : static_cast<uint32_t>(size));
  put<uint32_t>(bytes, is_large(begin) ? kSee64 : static_cast<uint32_t>(begin));
  put<uint16_t>(bytes, 0);
  return bytes;
}

uint64_t crc_in_header(const ZipRecord& record) {
  return record.header + 14;
}

uint64_t crc_in_directory(const std::vector<ZipRecord>& records, const ZipRecord& record, uint64_t begin) {
  for (const auto& other : records) {
    if (&other == &record || other.name == record.name) return begin + 16;
    begin += kEntryBytes + other.name.size() + entry_extra_bytes(other);
  }
  return begin + 16;
}

}  // namespace lockstep::detail
