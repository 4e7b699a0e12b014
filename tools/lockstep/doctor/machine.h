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

/// What a container or a batch system lets this process use. None: no limit.
struct CgroupLimits {
  std::optional<double> cores;
  std::optional<uint64_t> memory_bytes;
  uint64_t memory_used_bytes = 0;  // of that limit, without files that the kernel may drop
  std::optional<uint64_t> processes;

  bool operator==(const CgroupLimits&) const = default;
};

/// The smallest limits from this process's groups up to the root that can be seen, of cgroup v2 and v1.
/// `root` stands before every path that is read, for tests. What cannot be read is no limit.
CgroupLimits read_cgroup_limits(const std::filesystem::path& root = "/");

/// A limit of ulimit's. None: unlimited.
struct Ulimit {
  std::optional<uint64_t> soft;
  std::optional<uint64_t> hard;
};

/// Of a file system.
struct Space {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;  // for this user
};

struct SystemClock {
  int year = 1970;
  bool is_synchronized = false;  // the kernel was told so, by NTP or PTP
};

/// What this host has and what it lets this process use. Plain facts; doctor.h judges them.
struct Machine {
  std::string system;  // "Debian GNU/Linux 12 (bookworm)"
  std::string kernel;
  std::string architecture;  // "aarch64", "x86_64"
  std::string cpu_model;
  int cores = 1;          // switched on
  int allowed_cores = 1;  // that this process may run on
  int numa_nodes = 1;
  int allowed_numa_nodes = 1;  // with cores that this process may run on
  uint64_t memory_bytes = 0;
  uint64_t available_memory_bytes = 0;
  CgroupLimits cgroup;
  Ulimit open_files;
  Ulimit processes;      // threads count, of all of the user's programs
  Ulimit locked_memory;  // in bytes
  bool is_root = false;  // whom the limit of processes does not hold
  bool has_infiniband = false;
  std::optional<Space> shared_memory;  // /dev/shm; none when it is missing
  SystemClock clock;
};

/// Asks the kernel; takes milliseconds.
Machine read_machine();

/// Of the file system that holds `path`; none when there is no such path.
std::optional<Space> space_at(const std::string& path);

/// The cores that this process may use at the same time: of those it may run on, what the cgroup pays for. May be a
/// fraction.
double usable_cores(const Machine& machine);

/// The memory that can still be taken, here and in the cgroup.
uint64_t usable_memory_bytes(const Machine& machine);

/// "64 MiB", "23.4 GiB".
std::string format_bytes(uint64_t bytes);

}  // namespace lockstep::tool
