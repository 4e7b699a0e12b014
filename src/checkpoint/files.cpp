#include "checkpoint/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/start_thread.h"
#include "base/text.h"

namespace lockstep::detail {

void fail_file(const char* call, const std::string& path) {
  const int reason = errno;
  std::string remedy;
  if (reason == ENOSPC || reason == EDQUOT) remedy = "; free space on the disk, or keep fewer checkpoints";
  if (reason == EROFS || reason == EACCES || reason == EPERM) remedy = "; use a folder that this user can write to";
  throw SystemError(text(call, " ", path, ": ", std::strerror(reason), remedy));
}

bool is_json_deeper_than(int levels, std::string_view json) {
  int depth = 0;
  bool is_in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == '"') is_in_string = !is_in_string;
    if (is_in_string && c == '\\') ++i;
    if (is_in_string) continue;
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth > levels) return true;
  }
  return false;
}

void replace_file(const std::string& path, const std::string& content) {
  AtomicFile file(path);
  file.reserve(content.size());
  if (!content.empty()) file.write_at(0, content.data(), content.size());
  try {
    file.commit();
  } catch (const NotDurable& error) {
    log_warning(error.what());
  }
}

void make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const auto folder = path.substr(0, end);
    if (::mkdir(folder.c_str(), 0777) == 0)
      sync_folder(folder_of(folder));
    else if (errno != EEXIST)
      fail_file("mkdir", folder);
    if (end == std::string::npos) return;
  }
}

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

void sync_folder(const std::string& folder) {
  const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.is_open()) fail_file("open", folder);
  // Some network file systems cannot sync folders; their renames are durable without it.
  if (::fsync(opened.get()) != 0 && errno != EINVAL) fail_file("fsync", folder);
}

std::string ByteSource::read(uint64_t offset, size_t size) const {
  std::string bytes(size, '\0');
  read(offset, bytes.data(), size);
  return bytes;
}

namespace {

void check_range(uint64_t offset, size_t size, uint64_t all) {
  if (offset > all || size > all - offset)
    throw CheckpointError(text("bytes ", offset, " to ", offset + size, " are needed, but the file has only ", all,
                               " bytes: it is truncated or damaged"));
}

}  // namespace

FileSource::FileSource(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!file_.is_open() && errno == ENOENT) throw CheckpointError("there is no such file");
  if (!file_.is_open()) fail_file("open", path);
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) fail_file("fstat", path);
  if (!S_ISREG(status.st_mode)) throw CheckpointError("is not a regular file");
  size_ = static_cast<uint64_t>(status.st_size);
}

void FileSource::read(uint64_t offset, void* to, size_t size) const {
  check_range(offset, size, size_);
  auto* next = static_cast<char*>(to);
  while (size > 0) {
    const auto got = ::pread(file_.get(), next, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_file("read", path_);
    if (got == 0) throw CheckpointError(text("was truncated to ", offset, " bytes while it was read"));
    next += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

void MemorySource::read(uint64_t offset, void* to, size_t size) const {
  check_range(offset, size, bytes_.size());
  if (size > 0) std::memcpy(to, bytes_.data() + offset, size);
}

void MemorySink::write_at(uint64_t offset, const void* bytes, size_t size) {
  if (size > 0) std::memcpy(bytes_.data() + offset, bytes, size);
}

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  const auto slash = path.rfind('/');
  const auto name = path.substr(slash + 1);
  std::random_device random;
  temporary_ = text(path.substr(0, slash + 1), kTemporaryPrefix, name, "-", ::getpid(), "-", random());
  file_ = FileDescriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file_.is_open()) {
    const auto wanted = std::exchange(temporary_, "");
    fail_file("create", wanted);
  }
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::reserve(uint64_t size) {
  if (size > 0 && ::fallocate(file_.get(), 0, 0, static_cast<off_t>(size)) != 0 &&
      (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO))
    fail_file("write", temporary_);
}

void AtomicFile::write_at(uint64_t offset, const void* bytes, size_t size) {
  const uint64_t begin = offset;
  const auto* next = static_cast<const char*>(bytes);
  for (size_t left = size; left > 0;) {
    const auto put = ::pwrite(file_.get(), next, left, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_file("write", temporary_);
    next += put;
    offset += static_cast<uint64_t>(put);
    left -= static_cast<size_t>(put);
  }
  // Lets the disk begin at once, while later bytes are hashed. Only a hint: fsync in commit() reports errors.
  constexpr size_t kMinWritebackBytes = 256 << 10;
  if (size >= kMinWritebackBytes)
    ::sync_file_range(file_.get(), static_cast<off_t>(begin), static_cast<off_t>(size), SYNC_FILE_RANGE_WRITE);
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) fail_file("fsync", temporary_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_file("rename", path_);
  temporary_.clear();
  try {
    sync_folder(folder_of(path_));
  } catch (const SystemError& error) {
    throw NotDurable(text(error.what(), "; ", path_, " is complete, but a crash of this machine might lose it"));
  }
}

void for_each_in_parallel(size_t count, size_t threads, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;  // guarded by mutex
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    }
  };
  std::vector<std::thread> helpers;
  try {
    while (helpers.size() + 1 < std::min(threads, count)) helpers.push_back(start_thread("checkpoint", work));
  } catch (const SystemError&) {
    // The threads that have started do all of the work.
  }
  work();
  for (auto& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

size_t file_threads() {
  return static_cast<size_t>(std::max(1, at::get_num_threads()));
}

}  // namespace lockstep::detail
