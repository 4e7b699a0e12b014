#pragma once

#include <ftw.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>

/// Removes a folder with its contents. Not std::filesystem::remove_all: the libtorch.so of some wheels exports a copy
/// of it that crashes.
inline void remove_folder(const std::filesystem::path& folder) {
  const auto remove = [](const char* path, const struct stat*, int, struct FTW*) { return ::remove(path); };
  ::nftw(folder.c_str(), remove, 16, FTW_DEPTH | FTW_PHYS);
}

/// A temporary folder that is removed with its contents when the object is destroyed.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep_test_XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
  }
  ~TemporaryFolder() { remove_folder(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};
