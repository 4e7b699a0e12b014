#pragma once

#include <charconv>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "base/cgroup.h"

namespace lockstep::tool {

/// The contents of a small file, without the trailing newline; empty if the file cannot be read.
inline std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

/// `text` as a number; none unless all of the text is a number.
inline std::optional<uint64_t> to_integer(const std::string& text) {
  uint64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return std::nullopt;
  return number;
}

/// The number in a file; none for other text, such as "max", and for a missing file.
inline std::optional<uint64_t> read_integer(const std::filesystem::path& path) {
  return to_integer(read_text(path));
}

/// Limits of ulimit. None: unlimited.
struct Ulimit {
  std::optional<uint64_t> soft;
  std::optional<uint64_t> hard;
};

/// Size of a file system.
struct Space {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;  // for this user
};

struct SystemClock {
  int year = 1970;
  bool is_synchronized = false;  // by NTP or PTP, according to the kernel
};

/// Resources of this host and limits of this process; input of the checks.
struct Machine {
  std::string system;  // "Debian GNU/Linux 12 (bookworm)"
  std::string kernel;
  std::string architecture;  // "aarch64", "x86_64"
  std::string cpu_model;
  int cores = 1;          // online
  int allowed_cores = 1;  // in the affinity mask of this process
  int numa_nodes = 1;
  int allowed_numa_nodes = 1;  // with at least one allowed core
  uint64_t memory_bytes = 0;
  uint64_t available_memory_bytes = 0;
  CgroupLimits cgroup;
  Ulimit open_files;
  Ulimit processes;      // counts threads of all of the user's processes
  Ulimit locked_memory;  // in bytes
  bool is_root = false;  // root is exempt from the limit of processes
  bool has_infiniband = false;
  std::optional<Space> shared_memory;  // /dev/shm; none when it is missing
  SystemClock clock;
};

/// Reads /proc, /sys and system calls; takes milliseconds.
Machine read_machine();

/// Size of the file system that contains `path`; none if the path does not exist.
std::optional<Space> space_at(const std::string& path);

/// The number of cores this process may use at the same time: the allowed cores, capped by the cgroup quota. May be a
/// fraction.
double usable_cores(const Machine& machine);

/// The memory that can still be allocated, on this host and within the cgroup limit.
uint64_t usable_memory_bytes(const Machine& machine);

/// "64 MiB", "23.4 GiB".
std::string format_bytes(uint64_t bytes);

}  // namespace lockstep::tool
