#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "report/event_file.h"

// Reads event files without TensorBoard.

namespace lockstep::event_files {

/// All bytes of a file.
inline std::string file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The messages in a file. Fails the test unless the file consists of whole records with correct checksums.
inline std::vector<std::string> records_in(const std::string& path) {
  const auto bytes = file_bytes(path);
  std::vector<std::string> messages;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t length = 0;
    if (bytes.size() - at >= sizeof(length)) std::memcpy(&length, bytes.data() + at, sizeof(length));
    if (bytes.size() - at < 16 || bytes.size() - at - 16 < length) {
      ADD_FAILURE() << path << " ends with a part of a record";
      break;
    }
    const auto message = bytes.substr(at + 12, length);
    if (bytes.substr(at, length + 16) != detail::to_record(message)) {
      ADD_FAILURE() << path << ": the record at byte " << at << " has a wrong checksum";
      break;
    }
    messages.push_back(message);
    at += length + 16;
  }
  return messages;
}

/// The fields of a protocol buffer message: numbers as their bits, others as bytes.
struct Fields {
  explicit Fields(std::string_view bytes) {
    const auto take_varint = [&] {
      uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const auto byte = static_cast<unsigned char>(bytes.at(0));
        bytes.remove_prefix(1);
        value |= static_cast<uint64_t>(byte & 0x7f) << shift;
        if (byte < 0x80) return value;
      }
    };
    while (!bytes.empty()) {
      const auto key = take_varint();
      const int field = static_cast<int>(key >> 3);
      if ((key & 7) == 0) {
        numbers[field] = take_varint();
        continue;
      }
      const size_t size = (key & 7) == 1 ? 8 : (key & 7) == 5 ? 4 : take_varint();
      texts[field] = bytes.substr(0, size);
      bytes.remove_prefix(size);
    }
  }

  std::map<int, uint64_t> numbers;
  std::map<int, std::string> texts;
};

/// "tag@step" of each scalar in a file.
inline std::vector<std::string> scalars_in(const std::string& path) {
  std::vector<std::string> found;
  for (const auto& message : records_in(path)) {
    const Fields event(message);
    if (!event.texts.contains(5)) continue;
    const Fields value(Fields(event.texts.at(5)).texts.at(1));
    found.push_back(value.texts.at(1) + "@" + std::to_string(event.numbers.at(2)));
  }
  return found;
}

}  // namespace lockstep::event_files
