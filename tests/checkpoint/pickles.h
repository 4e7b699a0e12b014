#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "checkpoint/digest.h"
#include "checkpoint/pickle.h"
#include "checkpoint/zip.h"

/// Pickles that are written by hand.
namespace lockstep {

inline const std::string kStart = "\x80\x02";

inline std::string number(uint32_t value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

inline std::string string_opcode(const std::string& content) {
  return "X" + number(static_cast<uint32_t>(content.size())) + content;
}

inline std::string repeated(const std::string& opcodes, int count) {
  std::string all;
  all.reserve(opcodes.size() * static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) all += opcodes;
  return all;
}

/// Reads a pickle whose storages have as many bytes as it claims, but 1000 at most.
inline Value read_pickle(const std::string& pickle) {
  const detail::PickleReader reader(pickle);
  return reader.value([](const detail::StorageClaim& claim) {
    return at::zeros({static_cast<int64_t>(std::min<uint64_t>(claim.bytes, 1000))}, at::kByte);
  });
}

/// Opcodes of a tensor on storage "0" of so many elements.
inline std::string tensor_opcodes(const std::string& sizes, const std::string& strides,
                                  const std::string& type = "Float", char elements = 10) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + string_opcode("storage") + "ctorch\n" + type + "Storage\n" +
         string_opcode("0") + string_opcode("cpu") + "K" + elements + "tQK" + '\0' + "(" + sizes + "t(" + strides +
         "t\x89NtR";
}

/// A file of PyTorch's format with these records, without a manifest.
inline std::string zip_of(const std::vector<std::pair<std::string, std::string>>& contents) {
  std::vector<detail::ZipRecord> records;
  for (const auto& [name, content] : contents)
    records.push_back({.name = "archive/" + name, .size = content.size(), .crc = detail::crc32_of(content)});
  const auto directory = detail::lay_out_zip(records);
  std::string bytes;
  for (size_t i = 0; i < records.size(); ++i) bytes += detail::zip_header(records[i]) + contents[i].second;
  return bytes + detail::zip_directory(records, directory);
}

}  // namespace lockstep
