#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>

/// A control group with limited memory that is removed with the object; version 1 or 2, where this user may make one.
class SmallMemory {
 public:
  explicit SmallMemory(int64_t bytes) {
    for (const std::string root : {"/sys/fs/cgroup", "/sys/fs/cgroup/memory"}) {
      std::string group = root + "/lockstep_test_" + std::to_string(::getpid());
      if (::mkdir(group.c_str(), 0755) != 0) continue;
      for (const char* limit : {"/memory.max", "/memory.limit_in_bytes"}) {
        std::ofstream file(group + limit, std::ios::in);
        if (file && file << bytes << std::flush) path_ = group;
      }
      std::ofstream(group + "/memory.swap.max", std::ios::in) << 0;
      if (!path_.empty()) return;
      ::rmdir(group.c_str());
    }
  }
  ~SmallMemory() {
    for (int i = 0; i < 100 && !path_.empty() && ::rmdir(path_.c_str()) != 0; ++i) ::usleep(10000);
  }
  SmallMemory(const SmallMemory&) = delete;
  SmallMemory& operator=(const SmallMemory&) = delete;

  /// Empty if no such group could be made.
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};
