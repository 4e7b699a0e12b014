#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

#include "bench/rank_protocol.h"

namespace lockstep::bench {

/// The ranks' page, as lockstep makes it.
class PageFile {
 public:
  explicit PageFile(int ranks) : file_(::memfd_create("bench_test", MFD_CLOEXEC)) {
    if (::ftruncate(file_, page_bytes(ranks)) != 0) throw std::runtime_error("ftruncate");
  }
  ~PageFile() { ::close(file_); }
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

}  // namespace lockstep::bench
