#pragma once

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

namespace lockstep::tool {

/// The contents of a small file of the kernel's, without the line end; empty when it cannot be read.
inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

/// All of `text` as a number; none for anything else.
inline std::optional<uint64_t> to_integer(const std::string& text) {
  uint64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return std::nullopt;
  return number;
}

/// The number that is all of a file; none for another text, "max" say, or no file.
inline std::optional<uint64_t> read_integer(const std::filesystem::path& path) {
  return to_integer(read_text(path));
}

}  // namespace lockstep::tool
