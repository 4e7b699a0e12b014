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
constexpr int kReadFlags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;

/// The folder that contains `name`, below an open folder. `number` is -1, with errno set, if the folder cannot be
/// reached without links.
struct Parent {
  Parent(int folder, const std::filesystem::path& name) : number(folder) {
    for (const auto& part : name.parent_path()) {
      if (number < 0) break;
      opened = FileDescriptor(::openat(number, part.c_str(), kFolderFlags));
      number = opened.get();
    }
  }

  FileDescriptor opened{};  // closed if `name` has no folder: then the parent is the given folder
  int number;
};

FileDescriptor open_folder(const std::filesystem::path& path) {
  FileDescriptor folder(::open("/", kFolderFlags));
  for (const auto& part : path.relative_path()) {
    if (!folder.is_open()) break;
    folder = FileDescriptor(::openat(folder.get(), part.c_str(), kFolderFlags));
  }
  return folder;
}

bool does_not_exist(int error) {
  return error == ENOENT || error == ENOTDIR;
}

[[noreturn]] void refuse_unreadable(int error) {
  throw Error(error == ELOOP ? kLinkProblem : fmt::format("it cannot be read: {}", std::strerror(error)));
}

void check_regular(const struct stat& status) {
  if (S_ISLNK(status.st_mode)) throw Error(kLinkProblem);
  if (!S_ISREG(status.st_mode)) throw Error("it is not a regular file");
}

}  // namespace

double modified_at(const struct stat& status) {
  return static_cast<double>(status.st_mtim.tv_sec) + static_cast<double>(status.st_mtim.tv_nsec) * 1e-9;
}

std::string OpenFile::read(size_t offset, size_t count) const {
  std::string bytes(count, '\0');
  size_t done = 0;
  while (done < count) {
    const auto got = ::pread(file.get(), bytes.data() + done, count - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse_unreadable(errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

RunFolder::RunFolder(const std::filesystem::path& path)
    : folder_(open_folder(path)), error_(folder_.is_open() ? 0 : errno) {}

/// A closed descriptor, with errno set, on failure.
FileDescriptor RunFolder::open_below(const std::filesystem::path& name, int flags) const {
  if (!folder_.is_open()) {
    errno = error_;
    return {};
  }
  const Parent parent(folder_.get(), name);
  if (parent.number < 0) return {};
  return FileDescriptor(::openat(parent.number, name.filename().c_str(), flags | kReadFlags));
}

std::optional<OpenFile> RunFolder::open(const std::filesystem::path& name) const {
  // Before it is opened: to open a pipe, even without blocking, ends the wait of a process that opens it for writing.
  if (const auto found = status(name)) check_regular(*found);
  OpenFile opened{open_below(name, 0)};
  if (!opened.file.is_open()) {
    const int error = errno;
    const auto parent = name.parent_path();
    if (has_link(parent)) throw Error(fmt::format("{}: {}", parent.string(), kLinkProblem));
    if (does_not_exist(error)) return std::nullopt;
    refuse_unreadable(error);
  }
  if (::fstat(opened.file.get(), &opened.status) != 0) refuse_unreadable(errno);
  check_regular(opened.status);  // the file may have been replaced
  return opened;
}

std::vector<std::string> RunFolder::names(const std::filesystem::path& folder) const {
  if (has_link(folder)) throw Error(kLinkProblem);
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
  const Parent parent(folder_.get(), name);
  struct stat status {};
  if (parent.number < 0 || ::fstatat(parent.number, name.filename().c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0)
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
  return status("metrics.jsonl") || status("summary.json") || has_live_files();
}

bool RunFolder::has_live_files() const {
  if (!has_folder("live")) return false;
  try {
    const auto files = names("live");
    return std::any_of(files.begin(), files.end(), [](const std::string& name) {
      return name.ends_with(".json") && (name.starts_with("rank-") || name.starts_with("node-"));
    });
  } catch (const Error&) {
    return true;  // the description of the run has the reason
  }
}

}  // namespace lockstep::live
