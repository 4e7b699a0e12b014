#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/store.h>

#include "base/deadline.h"
#include "base/file_descriptor.h"
#include "base/log.h"
#include "base/owner_process.h"
#include "base/private_files.h"
#include "base/text.h"
#include "rendezvous/process_id.h"
#include "rendezvous/store/key_table.h"

// The file is a log of records: a header, then the bytes of key and value. A process locks the file, reads the records
// that other processes appended, and appends its own. A change of several keys is several records; all but the last
// have the flag kMoreFollow. If a process dies while it appends, the next holder of the lock truncates the incomplete
// change.
//
// Other users may write to the folder, for example /tmp, and the file contains the job's secret. A rank therefore
// creates the file under a random name (O_EXCL, mode 0600) and links it to the path once the store is complete. link()
// fails if the path exists, even as a dangling symbolic link. An existing file is opened only if it is a regular file
// of this user with mode 0600, and it is modified only if it begins with kMagic.
//
// Each rank holds a read lock on one byte beyond the data while it has the store open. The kernel releases the lock
// when the process ends for any reason. A file without this lock thus belongs to a dead job, and the last rank that
// closes the file can detect that it is the last and removes the file.

namespace lockstep {
namespace {

// A holder needs the lock for microseconds: after this time it is stopped, or file locks do not work.
constexpr std::chrono::seconds kLockLimit(30);
constexpr const char* kCreator = "lockstep/file_store/creator";
constexpr std::string_view kMagic = "lockstep store 1\n";  // first bytes of the file; other files are not modified
constexpr off_t kAliveByte = off_t{1} << 62;               // locked by every rank that has the store open
constexpr mode_t kGroupAndOthers = 077;

// Flags of a record. A record without them sets its key.
constexpr uint32_t kErases = 1;
constexpr uint32_t kAppends = 2;
constexpr uint32_t kMoreFollow = 4;  // the next record belongs to the same change

struct RecordHeader {
  uint32_t flags;
  uint32_t key_bytes;
  uint64_t value_bytes;
};

struct Record {
  uint32_t flags = 0;
  std::string key{};
  std::string value{};
};

/// Removes the temporary name of a file on destruction.
struct NameBeforeLinking {
  const std::string& name;
  ~NameBeforeLinking() { ::unlink(name.c_str()); }
};

class FileStore final : public Store {
 public:
  explicit FileStore(std::string path) : path_(std::move(path)) {
    std::lock_guard guard(mutex_);
    while (!open_existing() && !create()) {
      // Between the two calls another rank created the file, or the last rank of a job removed it.
    }
  }

  ~FileStore() override {
    try {
      std::lock_guard guard(mutex_);
      lock_file();
      // Unlock before the check: of two ranks that leave concurrently, one must detect that it is the last.
      set_lock(F_UNLCK, kAliveByte, 1);
      if (!is_open_elsewhere() && is_at_path()) ::unlink(path_.c_str());
      unlock_file();
    } catch (const std::exception& error) {
      log_warning(text("could not close the file store: ", error.what()));
    }
  }

  void set(const std::string& key, const std::string& value) override {
    Locked lock(*this);
    commit({{.key = key, .value = value}});
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    return multi_get({key}, timeout).front();
  }

  int64_t add(const std::string& key, int64_t amount) override {
    Locked lock(*this);
    int64_t sum = table_.sum(key, amount);
    commit({{.key = key, .value = std::to_string(sum)}});
    return sum;
  }

  void append(const std::string& key, const std::string& value) override {
    Locked lock(*this);
    commit({{kAppends, key, value}});
  }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    Locked lock(*this);
    if (table_.matches(key, expected)) commit({{.key = key, .value = desired}});
    return table_.find(key).value_or("");
  }

  std::vector<std::string> multi_get(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    const auto deadline = deadline_after(timeout);
    auto pause = std::chrono::milliseconds(1);
    for (;;) {
      {
        Locked lock(*this);
        const auto missing = table_.missing(keys);
        if (missing.empty()) return table_.values(keys);
        if (std::chrono::steady_clock::now() >= deadline) throw_keys_late(missing, timeout.count());
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(16));
    }
  }

  void multi_set(const std::vector<std::pair<std::string, std::string>>& values) override {
    std::vector<Record> change;
    for (const auto& [key, value] : values) change.push_back({kMoreFollow, key, value});
    if (!change.empty()) change.back().flags = 0;
    Locked lock(*this);
    commit(change);
  }

  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    multi_get(keys, timeout);
  }

  bool check(const std::vector<std::string>& keys) override {
    Locked lock(*this);
    return table_.missing(keys).empty();
  }

  bool erase(const std::string& key) override {
    Locked lock(*this);
    if (!table_.contains(key)) return false;
    commit({{kErases, key}});
    return true;
  }

 private:
  // Holds the mutex and the file lock. The constructor brings the table up to date.
  class Locked {
   public:
    explicit Locked(FileStore& store) : store_(store), guard_(checked(store).mutex_) {
      store_.lock_file();
      try {
        store_.replay();
      } catch (...) {
        store_.unlock_file();
        throw;
      }
    }
    ~Locked() { store_.unlock_file(); }

   private:
    // A forked child shares the file lock with its parent, so both would hold it at the same time.
    static FileStore& checked(FileStore& store) {
      store.owner_.check("the process that opened the store's file");
      return store;
    }

    FileStore& store_;
    std::lock_guard<std::mutex> guard_;
  };

  [[noreturn]] void fail(const char* call) const {
    throw SystemError(text("store: ", call, " ", path_, ": ", std::strerror(errno)));
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw UsageError(text("store: ", path_, " exists and is not a store that this process can use: ", why,
                          "; give file:// a path that does not exist yet, in a folder that only you can write to"));
  }

  struct stat status_of(const FileDescriptor& file) const {
    struct stat status {};
    if (::fstat(file.get(), &status) != 0) fail("fstat");
    return status;
  }

  // --- opening: called by the constructor

  /// Returns false if there is no file, or if the last rank has just removed it.
  bool open_existing() {
    // O_PATH does not open the file itself, so a device is not accessed and a pipe does not block.
    const FileDescriptor found(::open(path_.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (!found.is_open() && errno == ENOENT) return false;
    if (!found.is_open()) fail("open");
    require_own_file(status_of(found));
    file_ = FileDescriptor(::open(text("/proc/self/fd/", found.get()).c_str(), O_RDWR | O_CLOEXEC));
    if (!file_.is_open() && (errno == ENOENT || errno == ESTALE)) return false;
    if (!file_.is_open()) fail("open");
    lock_file();
    if (!is_at_path()) return false;
    require_magic();
    replay();
    if (!is_open_elsewhere())
      throw UsageError(text("store: ", path_, " was left behind by a job that has ended (",
                            table_.find(kCreator).value_or("an unknown process"), " created it): rm ", path_,
                            ", or choose another path. If that job still runs on another host, this file system has "
                            "no locks between hosts: use tcp://"));
    if (!set_lock(F_RDLCK, kAliveByte, 1)) fail("lock");
    unlock_file();
    return true;
  }

  void require_own_file(const struct stat& status) const {
    if (const auto why = why_not_own_file(status); !why.empty()) refuse(why);
    if ((status.st_mode & kGroupAndOthers) != 0)
      refuse(text("it has mode 0", std::oct, status.st_mode & 07777, " instead of 0600"));
  }

  void require_magic() {
    std::string magic(kMagic.size(), '\0');
    if (!read_at(magic.data(), magic.size(), 0) || magic != kMagic) refuse("it was not written by lockstep");
    read_to_ = static_cast<off_t>(kMagic.size());
  }

  /// Returns false if the path exists already.
  bool create() {
    std::string name = path_.substr(0, path_.rfind('/') + 1) + ".lockstep-store-XXXXXX";
    file_ = FileDescriptor(::mkostemp(name.data(), O_CLOEXEC));  // O_EXCL, mode 0600
    if (!file_.is_open()) fail("create");
    const NameBeforeLinking before{name};
    write_at(std::string(kMagic), 0);
    read_to_ = static_cast<off_t>(kMagic.size());
    commit({{.key = kCreator, .value = describe(this_process())}});
    if (!set_lock(F_RDLCK, kAliveByte, 1)) fail("lock");
    if (::link(name.c_str(), path_.c_str()) == 0) return true;
    const int error = errno;
    if (status_of(file_).st_nlink == 2) return true;  // NFS may have lost the reply of a successful link()
    errno = error;
    if (error != EEXIST) fail("create");
    table_ = {};
    read_to_ = 0;
    return false;
  }

  // --- locks

  bool set_lock(short type, off_t start, off_t bytes) const {
    struct flock range {};
    range.l_type = type;
    range.l_whence = SEEK_SET;
    range.l_start = start;
    range.l_len = bytes;
    return ::fcntl(file_.get(), F_OFD_SETLK, &range) == 0;
  }

  /// Returns whether another rank, or another FileStore of this process, has the store open.
  bool is_open_elsewhere() const {
    struct flock range {};
    range.l_type = F_WRLCK;
    range.l_whence = SEEK_SET;
    range.l_start = kAliveByte;
    range.l_len = 1;
    if (::fcntl(file_.get(), F_OFD_GETLK, &range) != 0) fail("lock");
    return range.l_type != F_UNLCK;
  }

  /// Returns whether the path still refers to this file.
  bool is_at_path() const {
    const auto opened = status_of(file_);
    struct stat named {};
    return ::lstat(path_.c_str(), &named) == 0 && named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
  }

  void lock_file() const {
    auto deadline = std::chrono::steady_clock::now() + kLockLimit;
    while (!set_lock(F_WRLCK, 0, kAliveByte)) {
      if (errno != EAGAIN && errno != EACCES && errno != EINTR) fail("lock");
      if (std::chrono::steady_clock::now() >= deadline)
        throw SystemError(text("store: ", path_, " has been locked by another process for ", kLockLimit.count(),
                               " s: check whether a rank is stopped in a debugger"));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  void unlock_file() const { set_lock(F_UNLCK, 0, kAliveByte); }

  // --- records

  bool read_at(void* data, size_t bytes, off_t offset) const {
    auto* to = static_cast<char*>(data);
    while (bytes > 0) {
      ssize_t got = ::pread(file_.get(), to, bytes, offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("read");
      if (got == 0) return false;
      to += got;
      offset += got;
      bytes -= static_cast<size_t>(got);
    }
    return true;
  }

  /// Reads the record at `offset` and moves the offset behind it. Returns none if the record is incomplete.
  std::optional<Record> read_record(off_t& offset, off_t end) const {
    RecordHeader header{};
    const off_t body = offset + static_cast<off_t>(sizeof header);
    if (body > end || !read_at(&header, sizeof header, offset)) return std::nullopt;
    const auto left = static_cast<uint64_t>(end - body);
    if (header.key_bytes > left || header.value_bytes > left - header.key_bytes) return std::nullopt;
    Record record{header.flags, std::string(header.key_bytes, '\0'), std::string(header.value_bytes, '\0')};
    read_at(record.key.data(), record.key.size(), body);
    read_at(record.value.data(), record.value.size(), body + static_cast<off_t>(record.key.size()));
    offset = body + static_cast<off_t>(record.key.size() + record.value.size());
    return record;
  }

  /// Applies the changes of other processes. Truncates a change that is incomplete, because its process died.
  void replay() {
    const off_t end = status_of(file_).st_size;
    off_t offset = read_to_;
    std::vector<Record> change;
    while (offset < end) {
      auto record = read_record(offset, end);
      if (!record) break;
      change.push_back(std::move(*record));
      if (change.back().flags & kMoreFollow) continue;
      apply(change);
      change.clear();
      read_to_ = offset;
    }
    if (read_to_ < end && ::ftruncate(file_.get(), read_to_) != 0) fail("truncate");
  }

  void apply(const std::vector<Record>& change) {
    for (const auto& record : change) {
      if (record.flags & kErases)
        table_.erase(record.key);
      else if (record.flags & kAppends)
        table_.append(record.key, record.value);
      else
        table_.set(record.key, record.value);
    }
  }

  /// Appends a change to the file and applies it.
  void commit(const std::vector<Record>& change) {
    std::string bytes;
    for (const auto& record : change) {
      const RecordHeader header{record.flags, static_cast<uint32_t>(record.key.size()), record.value.size()};
      bytes.append(reinterpret_cast<const char*>(&header), sizeof header);
      bytes += record.key;
      bytes += record.value;
    }
    write_at(bytes, read_to_);
    read_to_ += static_cast<off_t>(bytes.size());
    apply(change);
  }

  void write_at(const std::string& bytes, off_t offset) {
    size_t written = 0;
    while (written < bytes.size()) {
      ssize_t put =
          ::pwrite(file_.get(), bytes.data() + written, bytes.size() - written, offset + static_cast<off_t>(written));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail("write");
      written += static_cast<size_t>(put);
    }
  }

  const OwnerProcess owner_{};
  const std::string path_;
  std::mutex mutex_;
  FileDescriptor file_;  // guarded by mutex_
  off_t read_to_ = 0;    // guarded by mutex_: bytes of the file that are applied to table_
  KeyTable table_;       // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> open_file_store(const std::string& path) {
  return make_shared_owned<FileStore>(path);
}

}  // namespace lockstep
