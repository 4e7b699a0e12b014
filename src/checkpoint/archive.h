#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/value.h>

#include "checkpoint/files.h"
#include "checkpoint/zip.h"

// Checkpoints in PyTorch's zip format.
//
//   archive/data.pkl                 the value as a pickle
//   archive/byteorder                "little"
//   archive/data/0, archive/data/1   the storages of its tensors
//   archive/version                  "3"
//   archive/lockstep/manifest.json   checksums; Python ignores it
//
// The manifest lists name, offset, size and SHA-256 (see RecordDigest) of every other record, and ends with a SHA-256
// of the file. The SHA-256 of the file covers the manifest before this field and all bytes outside of records (headers,
// padding, directory). So each byte is hashed once and every change of a byte is found. Two fields depend on the
// SHA-256 of the file and are exempt: the CRC-32 of the manifest itself, in its header and in the directory. They count
// as zeros, and are compared with the manifest.
//
// Files may be hostile. Memory and time are linear in the size of the file, whatever it claims. Loading takes at most
// 200 bytes of memory for each byte of the pickle, 40 for each byte of a JSON header, and 1 for each byte of a storage:
//
// - A size is compared with the bytes that the file has before memory is allocated for it. No byte is in two records,
//   their headers included, and a tensor lies inside of its storage.
// - A value takes at most 160 bytes for each byte of its pickle, and 1 MiB (see PickleNodes). A reference to a tensor
//   counts as 600 bytes and 32 for each dimension, because code that writes or prints a value needs them, although
//   references to one tensor share it. The sum of the paths of the tensors is limited in the same way.
// - A tensor may have more elements than its storage: strides of 0, overlapping strides, and many tensors on one
//   storage are legitimate, and loading them takes no memory. Code that goes through the elements of tensors of a file,
//   or copies them, limits their number by the bytes of the storages: merge_shards(), and `lockstep checkpoint`.

namespace lockstep::detail {

/// Returns the SHA-256 of the file.
std::string write_archive(ByteSink& sink, const Value& value);

/// What load() has read of a record.
struct LoadedRecord {
  std::string name;
  std::string sha256;  // of the bytes in memory, as the manifest has it (see RecordDigest)
};

class ArchiveReader {
 public:
  /// Reads the directory and the manifest. Throws CheckpointError if the bytes are no zip file with a pickle.
  explicit ArchiveReader(const ByteSource& source);

  bool has_manifest() const { return !file_sha256_.empty(); }
  const std::string& sha256() const { return file_sha256_; }
  size_t size() const { return records_.size(); }

  /// Sets `loaded`, unless it is null, to all records: first the pickle, then the records of its tensors, in the
  /// pickle's order, then the other records. This requires options.verify, which reads and hashes all records anyway.
  Value load(const LoadOptions& options, std::vector<LoadedRecord>* loaded = nullptr) const;
  /// Reads everything and returns all damage.
  std::vector<Damage> verify() const;

 private:
  struct Read {
    const ZipRecord* record;
    void* to;              // null to only compare
    std::string sha256{};  // computed if the record is verified or identified
    std::string wrong{};   // what is wrong with the record; empty if it is intact or not verified
  };
  struct Checks {
    bool verify = true;
    bool identify = false;  // compute a SHA-256 although the file has none
  };
  std::string short_name(const ZipRecord& record) const;
  const ZipRecord& record(const std::string& name) const;
  void read_manifest();
  void check_manifest(const ZipRecord& manifest, const std::string& text);
  std::string digest_outside(const ZipRecord& manifest, std::string_view listed) const;
  void read_records(std::vector<Read>& reads, Checks checks) const;
  /// Throws CheckpointError if a record is damaged.
  void read_all(std::vector<Read>& reads, Checks checks) const;
  Value load_without_data(std::map<const void*, std::string>& record_of_storage) const;
  void name_tensors(std::vector<Damage>& damage) const;

  const ByteSource& source_;
  std::vector<ZipRecord> records_;
  std::string root_;                                 // the folder of all records: "archive/"
  std::map<std::string, const ZipRecord*> by_name_;  // without the root
  std::map<std::string, std::string> sha256_of_;     // by name, as by_name_; empty without a manifest
  std::string file_sha256_;
  std::string structure_damage_;  // damage of the zip structure; empty if there is none
};

/// Loads a file as lockstep::load_checkpoint() does. `loaded` is as in ArchiveReader::load(); it stays empty for a file
/// in the safetensors format.
Value load_with_digests(const std::string& path, const LoadOptions& options, std::vector<LoadedRecord>* loaded);

}  // namespace lockstep::detail
