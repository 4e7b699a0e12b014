#include "data/staging.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>
#include <lockstep/stage.h>

#include "base/error.h"
#include "base/log.h"
#include "base/private_files.h"
#include "base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr uint64_t kSyncBytes = uint64_t{64} << 20;     // limits how long a single sync blocks
constexpr mode_t kFileMode = 0666, kFolderMode = 0777;  // minus the umask
// Other users may write to the folder, so links are not followed and a pipe does not block the rank.
constexpr int kToWrite = O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;

template <class... Parts>
[[noreturn]] void fail_staging(const Parts&... parts) {
  const int error = errno;
  throw SystemError(text(parts..., ": ", std::strerror(error)));
}

FileDescriptor open_source(const fs::path& path) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) fail_staging(path, " cannot be opened");
  return file;
}

// Whether the path still refers to the open file.
bool is_called(const fs::path& path, const FileDescriptor& file) {
  struct stat named = {}, open = {};
  return ::lstat(path.c_str(), &named) == 0 && ::fstat(file.get(), &open) == 0 && named.st_dev == open.st_dev &&
         named.st_ino == open.st_ino;
}

// Opens an existing file for writing if this user owns it; otherwise returns a closed descriptor.
FileDescriptor open_if_own(const fs::path& path) {
  FileDescriptor file(::open(path.c_str(), kToWrite));
  struct stat status = {};
  const bool is_own = file.is_open() && ::fstat(file.get(), &status) == 0 && why_not_own_file(status).empty();
  return is_own ? std::move(file) : FileDescriptor();
}

// Opens and locks a partial file next to the target. Overwrites a leftover of an earlier job of this user. If another
// process is writing the partial file, or another user owns it, a different name is used.
std::pair<FileDescriptor, fs::path> open_partial(const fs::path& target) {
  fs::path partial = text(target.native(), ".partial");
  for (;;) {
    FileDescriptor file(::open(partial.c_str(), kToWrite | O_CREAT | O_EXCL, kFileMode));
    if (!file.is_open() && errno != EEXIST) fail_staging(partial, " cannot be opened");
    if (!file.is_open()) file = open_if_own(partial);
    if (!file.is_open() || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      partial = text(target.native(), ".partial-", std::random_device()());
    } else if (is_called(partial, file)) {
      if (::ftruncate(file.get(), 0) != 0) fail_staging(partial, " cannot be written");
      return {std::move(file), partial};
    }  // else another process has renamed it to its final name: retry
  }
}

bool is_same(const struct stat& one, const struct stat& other) {
  return one.st_size == other.st_size && one.st_mtim.tv_sec == other.st_mtim.tv_sec &&
         one.st_mtim.tv_nsec == other.st_mtim.tv_nsec;
}

void make_folder(const fs::path& folder) {
  if (::mkdir(folder.c_str(), kFolderMode) == 0) return;
  if (errno == ENOENT && folder.has_relative_path()) {
    make_folder(folder.parent_path());
    if (::mkdir(folder.c_str(), kFolderMode) == 0) return;
  }
  struct stat status = {};
  if (errno == EEXIST && ::stat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return;
  fail_staging("the folder ", folder, " cannot be created");
}

std::vector<std::string> names_in(const fs::path& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(folder.c_str()), ::closedir);
  if (!opened) fail_staging("the folder ", folder, " cannot be read");
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const auto* entry = ::readdir(opened.get());
    if (!entry && errno != 0) fail_staging("the folder ", folder, " cannot be read");
    if (!entry) return names;
    std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(std::move(name));
  }
}

}  // namespace

Staging::Staging(fs::path source, fs::path target) {
  folders_.push_back(target.parent_path());
  std::vector<Inode> inside;
  list(source, target, inside);
  for (const auto& folder : folders_) make_folder(folder);
  require_room(target.parent_path());
}

Staging::~Staging() {
  if (copy_) ::unlink(copy_->partial.c_str());
}

void Staging::list(const fs::path& from, const fs::path& to, std::vector<Inode>& inside) {
  struct stat source = {}, target = {};
  if (::stat(from.c_str(), &source) != 0) fail_staging(from, " cannot be read");
  if (S_ISDIR(source.st_mode)) {
    const Inode inode(source.st_dev, source.st_ino);
    if (std::find(inside.begin(), inside.end(), inode) != inside.end())
      throw SystemError(text(from, " is a link to a folder that contains it; remove the link"));
    inside.push_back(inode);
    folders_.push_back(to);
    for (const auto& name : names_in(from)) list(from / name, to / name, inside);
    inside.pop_back();
  } else if (S_ISREG(source.st_mode)) {
    if (::stat(to.c_str(), &target) == 0 && is_same(source, target)) return;
    missing_.push_back({from, to, source});
    missing_bytes_ += static_cast<uint64_t>(source.st_size);
  } else {
    throw SystemError(text(from, " is neither a regular file nor a folder; remove it from the source"));
  }
}

void Staging::require_room(const fs::path& folder) const {
  struct statvfs room = {};
  if (missing_bytes_ == 0 || ::statvfs(folder.c_str(), &room) != 0) return;
  const uint64_t free = uint64_t{room.f_bavail} * room.f_frsize;
  if (free < missing_bytes_)
    throw SystemError(
        text(folder, " has ", free, " bytes of free space, expected ", missing_bytes_, "; choose another disk"));
}

void Staging::run_for(std::chrono::milliseconds time) {
  const auto end = Clock::now() + time;
  while (!is_done()) {
    if (!copy_) copy_.emplace(begin());
    copy_piece();
    if (Clock::now() >= end) return;
  }
}

Staging::Copy Staging::begin() const {
  const File& file = missing_[next_];
  auto from = open_source(file.from);
  auto [to, partial] = open_partial(file.to);
  return {std::move(from), std::move(to), std::move(partial)};
}

void Staging::copy_piece() {
  const File& file = missing_[next_];
  buffer_.resize(kPieceBytes);
  ssize_t got = 0;
  do {
    got = ::read(copy_->from.get(), buffer_.data(), buffer_.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0) fail_staging(file.from, " cannot be read");
  for (ssize_t written = 0; written < got;) {
    const ssize_t step = ::write(copy_->to.get(), buffer_.data() + written, static_cast<size_t>(got - written));
    if (step < 0 && errno == EINTR) continue;
    if (step < 0) fail_staging(copy_->partial, " cannot be written");
    written += step;
  }
  copy_->copied += static_cast<uint64_t>(got);
  if (copy_->copied - copy_->on_disk >= kSyncBytes) {
    if (::fdatasync(copy_->to.get()) != 0) fail_staging(copy_->partial, " cannot be written");
    copy_->on_disk = copy_->copied;
  }
  if (got == 0) finish();
}

void Staging::finish() {
  const File& file = missing_[next_];
  struct stat now = {};
  if (::fstat(copy_->from.get(), &now) != 0) fail_staging(file.from, " cannot be read");
  if (!is_same(now, file.status) || copy_->copied != static_cast<uint64_t>(file.status.st_size))
    throw SystemError(text(file.from, " changed while it was copied; retry when no process writes to it"));
  const struct timespec times[] = {file.status.st_atim, file.status.st_mtim};
  if (::futimens(copy_->to.get(), times) != 0 || ::fsync(copy_->to.get()) != 0 ||
      ::rename(copy_->partial.c_str(), file.to.c_str()) != 0)
    fail_staging(file.to, " cannot be written");
  copy_.reset();
  ++next_;
}

namespace {

// How long a rank copies before its next collective, so that the other ranks' wait does not time out.
constexpr std::chrono::seconds kTurn(1);

fs::path target_of(const fs::path& source, const fs::path& folder) {
  auto normal = source.lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();  // the path ended in a slash
  return folder / normal.filename();
}

// One rank's part in stage(): copies files and records the error, if any.
class Part {
 public:
  explicit Part(const ProcessGroup& group) : group_(group) {}

  // Copies the missing files if it is this rank's turn. Blocks until all ranks whose turn it is are done. Collective.
  void run(const fs::path& source, const fs::path& target, bool is_my_turn) {
    std::optional<Staging> staging;
    attempt([&] {
      if (!is_my_turn) return;
      staging.emplace(source, target);
      if (!staging->is_done())
        log_info(text("staging ", source, " to ", target, ": ", staging->missing_bytes(), " bytes"));
    });
    auto busy = at::empty({1}, at::kLong);
    do {
      const bool is_busy = staging && !staging->is_done() && error_.empty();
      busy.fill_(is_busy ? 1 : 0);
      if (is_busy) attempt([&] { staging->run_for(kTurn); });
      group_.all_reduce(busy);
    } while (busy.item<int64_t>() > 0);
  }

  // Throws the errors of all ranks, on every rank. Collective.
  void agree() const {
    const auto errors = group_.all_gather_object(c10::IValue(error_));
    std::string all;
    for (size_t rank = 0; rank < errors.size(); ++rank)
      if (const auto& error = errors[rank].toStringRef(); !error.empty())
        all += text(all.empty() ? "" : "; ", "rank ", rank, ": ", error);
    if (all.empty()) return;
    try {
      group_.barrier();  // a rank that left earlier would abort the collective in which other ranks receive the errors
    } catch (const Error&) {
      // Ignored: `all` has the root cause.
    }
    throw SystemError(text("stage: ", all));
  }

 private:
  void attempt(const std::function<void()>& action) {
    try {
      action();
    } catch (...) {
      error_ = text("cannot be copied: ", message_of(std::current_exception()));  // never empty
    }
  }

  const ProcessGroup& group_;
  std::string error_{};
};

}  // namespace

fs::path stage(const ProcessGroup& group, const fs::path& source, const fs::path& folder) {
  const auto target = target_of(source, folder);
  Part part(group);
  part.run(source, target, group.local_rank() == 0);
  part.agree();
  part.run(source, target, true);  // ranks of one host may have different disks, for example in containers
  part.agree();
  return target;
}

}  // namespace lockstep
