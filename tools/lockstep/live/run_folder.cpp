#include "live/run_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::live {
namespace {

constexpr int kFolderFlags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

/// The folder with the last component of `name`, below `folder`. Closed, with errno set, if it cannot be reached
/// without links.
FileDescriptor folder_above(const FileDescriptor& folder, const std::filesystem::path& name) {
  FileDescriptor current(::openat(folder.get(), ".", kFolderFlags));
  for (const auto& part : name.parent_path()) {
    if (!current.is_open()) break;
    current = FileDescriptor(::openat(current.get(), part.c_str(), kFolderFlags));
  }
  return current;
}

FileDescriptor open_without_links(const FileDescriptor& folder, const std::filesystem::path& name, int flags) {
  const auto above = folder_above(folder, name);
  if (!above.is_open()) return {};
  const auto last = name.empty() ? std::filesystem::path(".") : name.filename();
  return FileDescriptor(
      ::openat(above.get(), last.c_str(), flags | O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

bool does_not_exist(int error) {
  return error == ENOENT || error == ENOTDIR;
}

[[noreturn]] void refuse_link() {
  throw Error("it is a symbolic link, which is not followed");
}

[[noreturn]] void refuse_unreadable(int error) {
  throw Error(fmt::format("it cannot be read: {}", std::strerror(error)));
}

}  // namespace

RunFolder::RunFolder(const std::filesystem::path& path)
    : folder_(open_without_links(FileDescriptor(::open(path.has_root_directory() ? "/" : ".", kFolderFlags)),
                                 path.relative_path(), O_PATH | O_DIRECTORY)),
      error_(folder_.is_open() ? 0 : errno) {}

/// A closed descriptor, with errno set, on failure.
FileDescriptor RunFolder::open_below(const std::filesystem::path& name, int flags) const {
  if (folder_.is_open()) return open_without_links(folder_, name, flags);
  errno = error_;
  return {};
}

std::optional<OpenFile> RunFolder::open(const std::filesystem::path& name) const {
  OpenFile opened{open_below(name, 0)};
  const int error = errno;
  if (!opened.file.is_open() && does_not_exist(error)) return std::nullopt;
  if (!opened.file.is_open() && error == ELOOP) refuse_link();
  if (!opened.file.is_open() && error == ENXIO) throw Error("it is not a regular file");  // a socket
  if (!opened.file.is_open() || ::fstat(opened.file.get(), &opened.status) != 0) refuse_unreadable(error);
  if (!S_ISREG(opened.status.st_mode)) throw Error("it is not a regular file");
  return opened;
}

std::vector<std::string> RunFolder::names(const std::filesystem::path& folder) const {
  if (has_link(folder)) refuse_link();
  std::vector<std::string> names;
  const auto opened = open_below(folder, O_DIRECTORY);
  if (!opened.is_open() && does_not_exist(errno)) return names;
  if (!opened.is_open()) refuse_unreadable(errno);
  const int copy = ::fcntl(opened.get(), F_DUPFD_CLOEXEC, 0);  // closedir() closes it
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::fdopendir(copy), ::closedir);
  if (!listing) {
    const int error = errno;
    if (copy >= 0) ::close(copy);
    refuse_unreadable(error);
  }
  while (const dirent* entry = ::readdir(listing.get())) names.emplace_back(entry->d_name);
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<struct stat> RunFolder::status(const std::filesystem::path& name) const {
  if (!folder_.is_open()) return std::nullopt;
  const auto above = folder_above(folder_, name);
  struct stat status {};
  if (!above.is_open() || ::fstatat(above.get(), name.filename().c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0)
    return std::nullopt;
  return status;
}

bool RunFolder::has_folder(const std::filesystem::path& name) const {
  const auto found = status(name);
  return found && S_ISDIR(found->st_mode);
}

bool RunFolder::has_link(const std::filesystem::path& name) const {
  const auto found = status(name);
  return found && S_ISLNK(found->st_mode);
}

bool RunFolder::is_run() const {
  return status("metrics.jsonl") || status("summary.json") || has_folder("live");
}

}  // namespace lockstep::live
