#include "comm/watch/flight_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <tuple>
#include <vector>

#include <lockstep/error.h>

#include "base/private_files.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

/// The files of one failure of the largest job on a host, 1024 ranks, stay together.
constexpr size_t kMostFiles = 1024;
constexpr std::string_view kBeginning = "lockstep-flight-";
constexpr std::string_view kEnding = ".jsonl";

struct FlightFolder {
  std::string path;
  FileDescriptor opened;
  bool is_private = false;
};

FlightFolder open_flight_folder() {
  if (const char* named = std::getenv("LOCKSTEP_FLIGHT_DIR"); named && *named) {
    FileDescriptor opened(::open(named, O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!opened.is_open()) throw SystemError(text("open ", named, ": ", std::strerror(errno)));
    return {named, std::move(opened)};
  }
  const char* temporary = std::getenv("TMPDIR");
  const auto path = text(temporary && *temporary ? temporary : "/tmp", "/lockstep-flight-", ::geteuid());
  return {path, open_private_folder(path, "set LOCKSTEP_FLIGHT_DIR to a folder of your own"), true};
}

struct FlightFile {
  std::string name;
  FileDescriptor opened;
};

/// O_EXCL: what somebody else has put under the name stays as it is, and the file gets another name, which cannot be
/// foreseen. The same holds for the file of an earlier process with this one's number.
FlightFile create_flight_file(const FlightFolder& folder, int rank) {
  auto process = text(::getpid());
  for (;;) {
    auto name = text(kBeginning, process, "-rank", rank, kEnding);
    FileDescriptor opened(::openat(folder.opened.get(), name.c_str(),
                                   O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    if (opened.is_open()) return {std::move(name), std::move(opened)};
    if (errno != EEXIST) throw SystemError(text("create ", folder.path, "/", name, ": ", std::strerror(errno)));
    process = text(::getpid(), "-", std::hex, std::random_device()());
  }
}

bool write_whole(const FileDescriptor& file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(file.get(), bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}

/// Ranks may do so at once: they remove the same files.
void remove_oldest(const FlightFolder& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(
      ::fdopendir(::openat(folder.opened.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)), &::closedir);
  if (!listing) return;
  std::vector<std::tuple<time_t, long, std::string>> files;  // by time of change
  while (const auto* entry = ::readdir(listing.get())) {
    const std::string_view name = entry->d_name;
    struct stat status {};
    if (!name.starts_with(kBeginning) || !name.ends_with(kEnding) ||
        ::fstatat(folder.opened.get(), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode))
      continue;
    files.emplace_back(status.st_mtim.tv_sec, status.st_mtim.tv_nsec, name);
  }
  if (files.size() <= kMostFiles) return;
  std::sort(files.begin(), files.end());
  files.resize(files.size() - kMostFiles);
  for (const auto& [seconds, nanoseconds, name] : files) ::unlinkat(folder.opened.get(), name.c_str(), 0);
}

}  // namespace

std::string write_flight_file(int rank, const std::string& content) {
  const auto folder = open_flight_folder();
  const auto file = create_flight_file(folder, rank);
  auto path = text(folder.path, "/", file.name);
  if (!write_whole(file.opened, content)) {
    const int error = errno;
    ::unlinkat(folder.opened.get(), file.name.c_str(), 0);
    throw SystemError(text("write ", path, ": ", std::strerror(error)));
  }
  if (folder.is_private) remove_oldest(folder);
  return path;
}

}  // namespace lockstep::detail
