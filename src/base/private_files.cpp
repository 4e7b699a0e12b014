#include "base/private_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

std::string why_not_own_file(const struct stat& status) {
  if (!S_ISREG(status.st_mode)) return "it is not a regular file";
  if (status.st_uid == ::geteuid()) return "";
  return text("it belongs to user ", status.st_uid, ", but this process runs as user ", ::geteuid());
}

FileDescriptor open_own_file(const std::string& path, int flags) {
  FileDescriptor file(::open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666));
  const int reason = errno;
  const auto refuse = [&](const std::string& why) {
    throw UsageError(text(path, ": ", why, "; remove it, or use another folder"));
  };
  if (!file.is_open()) {
    if (reason == ENOENT && (flags & O_CREAT) == 0) return file;
    if (reason == ELOOP) refuse("it is a symbolic link, not a regular file");
    if (reason == ENXIO || reason == EISDIR) refuse("it is not a regular file");  // ENXIO: a pipe without a reader
    const bool is_forbidden = reason == EROFS || reason == EACCES || reason == EPERM;
    throw SystemError(text("open ", path, ": ", std::strerror(reason),
                           is_forbidden ? "; use a folder that this user can write to" : ""));
  }
  struct stat status {
  }, folder{};
  if (::fstat(file.get(), &status) != 0) throw SystemError(text("fstat ", path, ": ", std::strerror(errno)));
  const auto why = why_not_own_file(status);
  if (why.empty()) return file;
  const auto slash = path.rfind('/');
  const auto above = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const bool is_of_folder = ::stat(above.c_str(), &folder) == 0 && folder.st_uid == status.st_uid;
  if (!S_ISREG(status.st_mode) || !is_of_folder) refuse(why);
  return file;
}

FileDescriptor open_private_folder(const std::string& folder, const std::string& remedy) {
  const auto fail = [&](const char* call) {
    throw SystemError(text(call, " ", folder, ": ", std::strerror(errno), "; ", remedy));
  };
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) fail("mkdir");
  FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!opened.is_open() && errno != ENOTDIR && errno != ELOOP && errno != EACCES) fail("open");
  if (!opened.is_open()) throw UsageError(text(folder, " is not a folder of this user: remove it, or ", remedy));
  struct stat status {};
  if (::fstat(opened.get(), &status) != 0) fail("fstat");
  if (status.st_uid != ::geteuid())
    throw UsageError(text(folder, " belongs to user ", status.st_uid, ", but this process runs as user ", ::geteuid(),
                          ": remove it, or ", remedy));
  if ((status.st_mode & 077) != 0)
    throw UsageError(text(folder, " has mode 0", std::oct, status.st_mode & 07777,
                          ", so other users could access or replace its files: chmod 700 ", folder, ", or ", remedy));
  return opened;
}

}  // namespace lockstep
