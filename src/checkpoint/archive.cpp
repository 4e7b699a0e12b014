#include "checkpoint/archive.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/text.h"
#include "checkpoint/digest.h"
#include "checkpoint/pickle.h"

namespace lockstep::detail {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kRoot = "archive/";
constexpr const char* kPickle = "data.pkl";
constexpr const char* kByteOrder = "byteorder";
constexpr const char* kData = "data/";
constexpr const char* kManifest = "lockstep/manifest.json";
constexpr std::string_view kDigestKey = "\"file_sha256\":\"";
constexpr std::string_view kManifestEnd = "\"}\n";
constexpr int kFormat = 1;
constexpr int kManifestLevels = 3;  // of objects and lists: the records, each an object
constexpr uint64_t kMaxPickle = uint64_t{1} << 32;

template <class... Parts>
[[noreturn]] void refuse_archive(const Parts&... parts) {
  throw CheckpointError(text(parts...));
}

/// Calls `visit(path, tensor)` for all tensors in a value, with keys and indices joined by dots. `path` is the path of
/// the value; all tensors use one string, because many short values may have one long key.
template <class Visit>
void for_each_named_tensor(const Value& value, std::string& path, const Visit& visit) {
  using Kind = Value::Kind;
  const size_t outer = path.size();
  const auto visit_inside = [&](const std::string& key, const Value& inner) {
    if (outer > 0) path += '.';
    path += key;
    for_each_named_tensor(inner, path, visit);
    path.resize(outer);
  };
  if (value.is(Kind::kTensor)) visit(path, value.tensor());
  if (value.is(Kind::kList) || value.is(Kind::kTuple) || value.is(Kind::kSet) || value.is(Kind::kObject))
    for (size_t i = 0; i < value.elements().size(); ++i) visit_inside(std::to_string(i), value.elements()[i]);
  if (value.is(Kind::kDict) || value.is(Kind::kObject))
    for (const auto& [key, item] : value.items())
      visit_inside(key.is(Kind::kString) ? key.as_string() : key.to_string(80), item);
}

/// Calls visit(record, chunk) for all chunks of all records, on several threads.
template <class Visit>
void for_each_chunk(const std::vector<RecordDigest>& digests, const Visit& visit) {
  std::vector<std::pair<size_t, size_t>> chunks;
  for (size_t record = 0; record < digests.size(); ++record)
    for (size_t chunk = 0; chunk < digests[record].chunk_count(); ++chunk) chunks.emplace_back(record, chunk);
  for_each_in_parallel(chunks.size(), file_threads(), [&](size_t i) { visit(chunks[i].first, chunks[i].second); });
}

/// The manifest up to the digest of the file.
std::string manifest_text(const std::vector<ZipRecord>& records, const std::vector<std::string>& sha256s) {
  ordered_json manifest;
  manifest["format"] = kFormat;
  manifest["lockstep"] = LOCKSTEP_VERSION_STRING;
  auto& list = manifest["records"] = ordered_json::array();
  for (size_t i = 0; i < sha256s.size(); ++i)
    list.push_back({{"name", records[i].name.substr(std::strlen(kRoot))},
                    {"offset", records[i].offset},
                    {"size", records[i].size},
                    {"sha256", sha256s[i]}});
  auto written = manifest.dump();
  written.pop_back();  // the closing brace
  return text(written, ",", kDigestKey);
}

}  // namespace

std::string write_archive(ByteSink& sink, const Value& value) {
  auto pickled = write_pickle(value);
  for (auto& storage : pickled.storages) storage = storage.cpu();
  const std::string byte_order = "little", version = "3\n";

  std::vector<ZipRecord> records;
  std::vector<std::string_view> contents;
  const auto add = [&](const std::string& name, std::string_view content) {
    records.push_back({.name = kRoot + name, .size = content.size()});
    contents.push_back(content);
  };
  add(kPickle, pickled.bytes);
  add(kByteOrder, byte_order);
  for (size_t i = 0; i < pickled.storages.size(); ++i) {
    const auto& storage = pickled.storages[i];
    add(text(kData, i), {static_cast<const char*>(storage.data_ptr()), storage.nbytes()});
  }
  add("version", version);
  records.push_back({.name = text(kRoot, kManifest)});
  lay_out_zip(records);
  // The sizes of the manifest do not depend on the digests in it.
  std::vector<std::string> sha256s(contents.size(), std::string(kSha256Digits, '0'));
  auto& manifest = records.back();
  manifest.size = manifest_text(records, sha256s).size() + kSha256Digits + kManifestEnd.size();
  const uint64_t begin = lay_out_zip(records);
  sink.reserve(begin + zip_directory(records, begin).size());

  std::vector<RecordDigest> digests;
  for (const auto& content : contents)
    digests.emplace_back(content.size(), RecordDigest::Kinds{.sha256 = true, .crc = true});
  for_each_chunk(digests, [&](size_t i, size_t chunk) {
    const size_t begin_of_chunk = chunk * RecordDigest::kChunk;
    const char* bytes = contents[i].data() + begin_of_chunk;
    digests[i].add_chunk(chunk, bytes);
    sink.write_at(records[i].offset + begin_of_chunk, bytes, digests[i].chunk_size(chunk));
  });
  for (size_t i = 0; i < digests.size(); ++i) {
    sha256s[i] = digests[i].sha256();
    records[i].crc = digests[i].crc();
  }

  // With a manifest CRC of zero, as the digest of the file requires.
  Sha256 sha;
  auto listed = manifest_text(records, sha256s);
  for (const auto& record : records) sha.add(zip_header(record));
  sha.add(zip_directory(records, begin));
  sha.add(listed);
  const auto file_digest = hexadecimal(sha.finish());
  listed += file_digest;
  listed += kManifestEnd;
  manifest.crc = crc32_of(listed);
  sink.write_at(manifest.offset, listed.data(), listed.size());
  for (const auto& record : records) {
    const auto header = zip_header(record);
    sink.write_at(record.header, header.data(), header.size());
  }
  const auto directory = zip_directory(records, begin);
  sink.write_at(begin, directory.data(), directory.size());
  return file_digest;
}

ArchiveReader::ArchiveReader(const ByteSource& source) : source_(source), records_(read_zip(source)) {
  if (records_.empty()) refuse_archive("the zip file is empty");
  for (const auto& record : records_)
    if (const auto end = record.name.find('/'); end != std::string::npos && record.name.substr(end + 1) == kPickle)
      root_ = record.name.substr(0, end + 1);
  if (root_.empty()) refuse_archive("the zip file has no record ", kPickle, ": it is not a PyTorch file");
  for (const auto& record : records_)
    if (record.name.starts_with(root_)) by_name_[record.name.substr(root_.size())] = &record;
  read_manifest();
  if (const auto found = by_name_.find(kByteOrder); found != by_name_.end() && found->second->size <= 16)
    if (source_.read(found->second->offset, found->second->size) == "big")
      refuse_archive("was written by a big-endian machine, which is not supported");
}

std::string ArchiveReader::short_name(const ZipRecord& record) const {
  return record.name.starts_with(root_) ? record.name.substr(root_.size()) : record.name;
}

const ZipRecord& ArchiveReader::record(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) refuse_archive("record '", name, "' is missing");
  if (found->second->is_compressed) refuse_archive("record '", name, "' is compressed, which is not supported");
  return *found->second;
}

// --- manifest

void ArchiveReader::read_manifest() {
  const auto found = by_name_.find(kManifest);
  if (found == by_name_.end()) return;
  const auto& manifest = record(kManifest);
  if (manifest.size > kMaxPickle) refuse_archive("record '", kManifest, "' claims ", manifest.size, " bytes");
  const auto content = source_.read(manifest.offset, manifest.size);
  try {
    check_manifest(manifest, content);
  } catch (const CheckpointError& error) {
    structure_damage_ = error.what();
  } catch (const json::exception& error) {
    structure_damage_ = error.what();
  }
}

void ArchiveReader::check_manifest(const ZipRecord& manifest, const std::string& content) {
  const size_t tail = kSha256Digits + kManifestEnd.size();
  if (content.size() < tail + kDigestKey.size() || !content.ends_with(kManifestEnd))
    refuse_archive("the manifest has no end");
  const auto listed = std::string_view(content).substr(0, content.size() - tail);
  file_sha256_ = content.substr(listed.size(), kSha256Digits);
  if (!listed.ends_with(kDigestKey)) refuse_archive("the manifest has no digest of the file");
  if (crc32_of(content) != manifest.crc) refuse_archive("the checksum of the manifest differs");
  if (digest_outside(manifest, listed) != file_sha256_)
    refuse_archive("the headers or the manifest differ from their SHA-256");
  if (is_json_deeper_than(kManifestLevels, content))
    refuse_archive("the manifest has more than ", kManifestLevels, " levels of objects and lists");
  const auto parsed = json::parse(content);
  if (parsed.at("format") != kFormat)
    refuse_archive("the manifest has format ", parsed.at("format").dump(), ", expected ", kFormat,
                   "; use a newer lockstep");
  size_t index = 0;
  for (const auto& item : parsed.at("records")) {
    while (index < records_.size() && &records_[index] == &manifest) ++index;
    if (index == records_.size()) refuse_archive("the manifest lists more records than the file has");
    const auto& actual = records_[index++];
    const auto name = item.at("name").get<std::string>();
    if (short_name(actual) != name || item.at("size") != actual.size || item.at("offset") != actual.offset)
      refuse_archive("record '", short_name(actual), "' differs from the manifest's '", name, "'");
    sha256_of_[name] = item.at("sha256").get<std::string>();
  }
  if (sha256_of_.size() + 1 != records_.size())
    refuse_archive("the manifest lists ", sha256_of_.size(), " records, the file has ", records_.size() - 1);
}

/// Returns the SHA-256 of all bytes outside of records, and of the manifest up to its digest.
std::string ArchiveReader::digest_outside(const ZipRecord& manifest, std::string_view listed) const {
  Sha256 sha;
  const uint64_t directory = manifest.offset + manifest.size;  // the manifest is the last record
  const std::array zeros{crc_in_header(manifest), crc_in_directory(records_, manifest, directory)};
  uint64_t next = 0;
  const auto add_up_to = [&](uint64_t end) {
    while (next < end) {
      const auto size = static_cast<size_t>(std::min<uint64_t>(RecordDigest::kChunk, end - next));
      auto bytes = source_.read(next, size);
      for (uint64_t zero : zeros)
        for (uint64_t at = zero; at < zero + sizeof(uint32_t); ++at)
          if (at >= next && at < next + size) bytes[at - next] = '\0';
      sha.add(bytes);
      next += size;
    }
  };
  for (const auto& record : records_) {
    add_up_to(record.offset);
    next = record.offset + record.size;
  }
  add_up_to(source_.size());
  sha.add(listed);
  return hexadecimal(sha.finish());
}

// --- records

void ArchiveReader::read_records(std::vector<Read>& reads, Checks checks) const {
  std::vector<RecordDigest> digests;
  for (const auto& read : reads) {
    const auto& record = *read.record;
    const bool is_listed = sha256_of_.contains(short_name(record));
    digests.emplace_back(record.size, RecordDigest::Kinds{.sha256 = checks.identify || (checks.verify && is_listed),
                                                          .crc = checks.verify && !is_listed && !record.is_compressed});
  }
  for_each_chunk(digests, [&](size_t i, size_t chunk) {
    const size_t begin = chunk * RecordDigest::kChunk, size = digests[i].chunk_size(chunk);
    std::unique_ptr<char[]> buffer;
    char* to = static_cast<char*>(reads[i].to) + begin;
    if (!reads[i].to) {
      buffer.reset(new char[size]);
      to = buffer.get();
    }
    source_.read(reads[i].record->offset + begin, to, size);
    digests[i].add_chunk(chunk, to);
  });
  for (size_t i = 0; (checks.verify || checks.identify) && i < reads.size(); ++i) {
    auto& read = reads[i];
    const auto expected = sha256_of_.find(short_name(*read.record));
    const bool is_listed = expected != sha256_of_.end();
    if (is_listed || checks.identify) read.sha256 = digests[i].sha256();
    if (checks.verify && is_listed && read.sha256 != expected->second) read.wrong = "differs from its SHA-256";
    if (checks.verify && !is_listed && !read.record->is_compressed && digests[i].crc() != read.record->crc)
      read.wrong = "differs from its CRC-32";
  }
}

void ArchiveReader::read_all(std::vector<Read>& reads, Checks checks) const {
  read_records(reads, checks);
  for (const auto& read : reads)
    if (!read.wrong.empty())
      refuse_archive("record '", short_name(*read.record), "' ", read.wrong, ": the file is damaged");
}

Value ArchiveReader::load(const LoadOptions& options, std::vector<LoadedRecord>* loaded) const {
  const Checks checks{.verify = options.verify, .identify = loaded != nullptr};
  if (options.verify && !structure_damage_.empty()) refuse_archive(structure_damage_, ": the file is damaged");
  const auto& pickle = record(kPickle);
  if (pickle.size > kMaxPickle) refuse_archive("record '", kPickle, "' claims ", pickle.size, " bytes");
  std::string bytes(pickle.size, '\0');
  std::vector<Read> of_pickle{{&pickle, bytes.data()}};
  read_all(of_pickle, checks);
  const PickleReader reader(bytes);
  if (options.map_location.is_meta()) return reader.value([](const StorageClaim&) { return at::Tensor(); });

  std::map<std::string, at::Tensor> storages;
  std::vector<Read> reads;
  std::map<const ZipRecord*, bool> is_read{{&pickle, true}};
  for (const auto& claim : reader.storages()) {
    const auto& found = record(kData + claim.key);
    if (claim.bytes > found.size)
      refuse_archive("record '", short_name(found), "' has ", found.size, " bytes, expected ", claim.bytes);
    auto& storage = storages[claim.key] = at::empty({static_cast<int64_t>(found.size)}, at::kByte);
    reads.push_back({&found, storage.data_ptr()});
    is_read[&found] = true;
  }
  if (options.verify)
    for (const auto& other : records_)
      if (!is_read.count(&other)) reads.push_back({&other, nullptr});
  read_all(reads, checks);
  if (loaded) {
    loaded->clear();
    for (const auto* part : {&of_pickle, &reads})
      for (const auto& read : *part) loaded->push_back({short_name(*read.record), read.sha256});
  }
  return reader.value([&](const StorageClaim& claim) {
    const auto device = options.map_location(claim.device);
    return device.is_cpu() ? storages[claim.key] : storages[claim.key].to(device);
  });
}

std::vector<Damage> ArchiveReader::verify() const {
  std::vector<Damage> damage;
  if (!structure_damage_.empty()) damage.push_back({"", structure_damage_});
  std::vector<Read> reads;
  for (const auto& record : records_) reads.push_back({&record, nullptr});
  read_records(reads, {.verify = true});
  for (const auto& read : reads)
    if (!read.wrong.empty()) damage.push_back({short_name(*read.record), read.wrong});
  if (!damage.empty()) name_tensors(damage);
  return damage;
}

/// Returns the value with storages that have no data, and the record of each storage.
Value ArchiveReader::load_without_data(std::map<const void*, std::string>& record_of_storage) const {
  const auto& pickle = record(kPickle);
  if (pickle.size > kMaxPickle) refuse_archive("record '", kPickle, "' claims ", pickle.size, " bytes");
  std::string bytes(pickle.size, '\0');
  std::vector<Read> reads{{&pickle, bytes.data()}};
  read_all(reads, {.verify = true});
  return PickleReader(bytes).value([&](const StorageClaim& claim) {
    const auto name = kData + claim.key;
    if (claim.bytes > record(name).size) refuse_archive("record '", name, "' has fewer bytes than its tensors");
    auto storage = at::empty({static_cast<int64_t>(record(name).size)}, at::kByte);  // its pages are never touched
    record_of_storage[storage.storage().unsafeGetStorageImpl()] = name;
    return storage;
  });
}

void ArchiveReader::name_tensors(std::vector<Damage>& damage) const {
  try {
    std::map<const void*, std::string> record_of_storage;
    const auto value = load_without_data(record_of_storage);
    std::map<std::string_view, Damage*> damage_of;
    for (auto& one : damage) damage_of.emplace(one.record, &one);
    std::string path;
    for_each_named_tensor(value, path, [&](const std::string& name, const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      const auto record = record_of_storage.find(tensor.storage().unsafeGetStorageImpl());
      if (record == record_of_storage.end()) return;
      if (const auto found = damage_of.find(record->second); found != damage_of.end())
        found->second->tensors.push_back(name);
    });
  } catch (const CheckpointError&) {
    // The pickle is damaged too, so the names of the tensors are not known.
  }
}

}  // namespace lockstep::detail
