#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include <ATen/ATen.h>

#include "checkpoint/pickle.h"

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

}  // namespace lockstep
