#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "live/run_folder.h"

/// Text of files that other processes are writing.
namespace lockstep::live {

/// The whole file; none if there is no such file. Throws Error with the reason if the file cannot be opened or read, or
/// has more than `most` bytes.
std::optional<std::string> read_bytes(const RunFolder& run, const std::filesystem::path& name, size_t most);

/// The text without escape sequences and with a blank for each tab and each other control character. Bytes that are not
/// UTF-8 become U+FFFD. Pure.
std::string printable(std::string_view text);

/// The last lines of the output of a rank, printable, oldest first; empty without the file. The path is canonical.
/// Throws Error with the reason if the file cannot be opened or read.
std::vector<std::string> last_lines(const std::filesystem::path& run, int64_t rank, size_t count);

/// The last value of each metric in the metrics.jsonl of a run, with "step", "epoch" and "seconds". Reads only the end
/// of the file. Empty if there is no file or it cannot be read; damaged lines are skipped. The path is canonical.
std::map<std::string, double> last_metrics(const std::filesystem::path& run);

}  // namespace lockstep::live
