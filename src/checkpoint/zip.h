#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files.h"

// The subset of the zip format that PyTorch's files use: records without compression, each aligned to 64 bytes, with
// 64-bit sizes where needed.

namespace lockstep::detail {

struct ZipRecord {
  std::string name;
  uint64_t header = 0;  // where the record's local header begins
  uint64_t offset = 0;  // where its data begins
  uint64_t size = 0;    // of its data in the file
  uint32_t crc = 0;
  bool is_compressed = false;
};

/// Returns the records of a zip file, in the order of their data. Checks that each lies inside of the file, that none
/// overlap, that no name occurs twice and that both headers of a record agree. Does not read the data. Throws
/// CheckpointError unless the bytes are such a file.
std::vector<ZipRecord> read_zip(const ByteSource& source);

/// Assigns header and offset to the records, one after the other from the start of a file. Requires names and sizes.
/// Returns where the central directory begins.
uint64_t lay_out_zip(std::vector<ZipRecord>& records);

/// Returns a record's header, with the padding before its data.
std::string zip_header(const ZipRecord& record);
/// Returns the directory that follows the last record. `begin` is its position.
std::string zip_directory(const std::vector<ZipRecord>& records, uint64_t begin);

/// Positions of the fields for `record`'s CRC, in its header and in the directory of all records.
uint64_t crc_in_header(const ZipRecord& record);
uint64_t crc_in_directory(const std::vector<ZipRecord>& records, const ZipRecord& record, uint64_t begin);

}  // namespace lockstep::detail
