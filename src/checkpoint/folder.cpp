#include "checkpoint/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <iomanip>
#include <iterator>
#include <memory>
#include <random>
#include <sstream>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/private_files.h"
#include "base/text.h"
#include "checkpoint/files.h"

namespace lockstep::detail {
namespace {

constexpr const char* kLockFile = ".lock";
constexpr std::string_view kExtension = ".pt";
constexpr std::string_view kShard = ".shard-";

std::string describe_owner() {
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char date[32] = {};
  std::strftime(date, sizeof(date), "%Y-%m-%d %H:%M:%S", ::localtime_r(&now, &parts));
  return text("process ", ::getpid(), " on ", host, ", which opened it at ", date, " (id ", random_digits(), ")");
}

void copy_file(const std::string& from, const std::string& to) {
  const FileSource source(from);
  AtomicFile file(to);
  constexpr uint64_t kPart = 1 << 20;
  for (uint64_t at = 0; at < source.size(); at += kPart) {
    const auto bytes = source.read(at, static_cast<size_t>(std::min(kPart, source.size() - at)));
    file.write_at(at, bytes.data(), bytes.size());
  }
  file.commit();
}

}  // namespace

std::string random_digits() {
  std::random_device random;
  std::ostringstream digits;
  digits << std::hex << std::setw(8) << std::setfill('0') << random();
  return digits.str();
}

std::string checkpoint_name(const std::string& unit, int64_t number) {
  auto digits = std::to_string(number);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');  // so that names sort as numbers do
  return text(unit, "-", digits, kExtension);
}

std::string shard_name(const std::string& unit, int64_t number, int shard, int shards, const std::string& digits) {
  auto name = checkpoint_name(unit, number);
  name.resize(name.size() - kExtension.size());
  return text(name, kShard, shard, "-of-", shards, "-", digits, kExtension);
}

FolderContents read_folder(const std::string& folder, const std::string& unit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(folder.c_str()), ::closedir);
  if (!opened) fail_file("opendir", folder);
  FolderContents contents;
  while (const auto* entry = ::readdir(opened.get())) {
    const std::string_view name = entry->d_name;
    if (name.starts_with(AtomicFile::kTemporaryPrefix)) contents.unfinished.emplace_back(name);
    if (name == kBestFile) contents.has_best = true;
    if (!name.starts_with(unit + "-") || !name.ends_with(kExtension)) continue;
    const auto shard = name.find(kShard);
    auto digits = name.substr(0, shard == std::string_view::npos ? name.size() - kExtension.size() : shard);
    digits.remove_prefix(unit.size() + 1);
    const auto number = parse_number<int64_t>(digits);
    if (!number || *number < 0) continue;
    if (shard != std::string_view::npos)
      contents.shards.emplace_back(name);
    else if (checkpoint_name(unit, *number) == name)
      contents.numbers.insert(*number);
  }
  return contents;
}

std::vector<int64_t> plan_removals(const std::set<int64_t>& numbers, int64_t saved, int keep_last, int64_t keep_every) {
  std::vector<int64_t> removed;
  if (keep_last == 0) return removed;
  auto left = std::distance(numbers.begin(), numbers.upper_bound(saved));
  for (auto number = numbers.begin(); left > keep_last; ++number, --left)
    if (keep_every == 0 || *number % keep_every != 0) removed.push_back(*number);
  return removed;
}

FileDescriptor lock_folder(const std::string& folder) {
  make_folders(folder);
  const auto path = text(folder, "/", kLockFile);
  auto file = open_own_file(path, O_RDWR | O_CREAT);
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK)
      throw UsageError(text("checkpoint folder ", folder, " is in use by ", read_owner(folder),
                            "; use another folder, or end that job first"));
    if (errno != ENOSYS && errno != ENOLCK && errno != EOPNOTSUPP) fail_file("flock", path);
    log_warning(text("the file system of checkpoint folder ", folder, " has no locks (", std::strerror(errno),
                     "): do not start a second job that uses the folder"));
  }
  const auto owner = describe_owner();
  if (::ftruncate(file.get(), 0) != 0) fail_file("truncate", path);
  if (::pwrite(file.get(), owner.data(), owner.size(), 0) != static_cast<ssize_t>(owner.size()))
    fail_file("write", path);
  ::fdatasync(file.get());  // so that other hosts see it
  return file;
}

std::string read_owner(const std::string& folder) {
  const auto file = open_own_file(text(folder, "/", kLockFile), O_RDONLY);
  if (!file.is_open()) return "";
  std::string owner(512, '\0');
  const auto size = ::pread(file.get(), owner.data(), owner.size(), 0);
  owner.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return owner;
}

void link_file(const std::string& from, const std::string& to) {
  const auto temporary =
      text(folder_of(to), "/", AtomicFile::kTemporaryPrefix, to.substr(to.rfind('/') + 1), "-", ::getpid());
  ::unlink(temporary.c_str());
  if (::link(from.c_str(), temporary.c_str()) != 0) return copy_file(from, to);
  if (::rename(temporary.c_str(), to.c_str()) != 0) fail_file("rename", to);
  // If both names already are the same file, rename() does nothing and leaves the temporary name.
  ::unlink(temporary.c_str());
  try {
    sync_folder(folder_of(to));
  } catch (const SystemError& error) {
    throw NotDurable(text(error.what(), "; a crash of this machine might lose ", to));
  }
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    log_warning(text("cannot remove ", path, ": ", std::strerror(errno)));
}

}  // namespace lockstep::detail
