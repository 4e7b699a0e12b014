#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>

#include <lockstep/error.h>
#include <lockstep/store.h>

#include "base/deadline.h"
#include "base/log.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "rendezvous/table.h"

// The file is a log of records, each a header and then the bytes of key and value; whoever holds the lock on the file
// reads what others have appended and appends what it does itself. A record that a dying process left unfinished at the
// end is cut off by the next holder of the lock.

namespace lockstep {
namespace {

constexpr std::chrono::seconds kLockLimit(
    30);  // a holder needs microseconds: after this it is stopped or the lock broken
constexpr const char* kMembers = "lockstep/file_store/members";
constexpr std::string_view kMagic = "lockstep store 1\n";  // before all records: no other file is touched

struct RecordHeader {
  uint32_t erases;
  uint32_t key_bytes;
  uint64_t value_bytes;
};

class FileStore final : public Store {
 public:
  explicit FileStore(std::string path) : path_(std::move(path)) {
    Locked lock(*this);
    append_set(kMembers, std::to_string(table_.sum(kMembers, 1)));
  }

  ~FileStore() override {
    try {
      Locked lock(*this);
      int64_t left = table_.sum(kMembers, -1);
      append_set(kMembers, std::to_string(left));
      if (left == 0) ::unlink(path_.c_str());
    } catch (const std::exception& error) {
      log_warning(text("could not leave the store: ", error.what()));
    }
    if (file_ >= 0) ::close(file_);
  }

  void set(const std::string& key, const std::string& value) override {
    Locked lock(*this);
    append_set(key, value);
  }

  std::string get(const std::string& key, std::chrono::milliseconds timeout) override {
    wait({key}, timeout);
    Locked lock(*this);
    auto value = table_.find(key);
    if (!value) throw UsageError(text("store: key '", key, "' was erased while a rank was waiting for it"));
    return *value;
  }

  int64_t add(const std::string& key, int64_t amount) override {
    Locked lock(*this);
    int64_t sum = table_.sum(key, amount);
    append_set(key, std::to_string(sum));
    return sum;
  }

  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) override {
    Locked lock(*this);
    if (table_.matches(key, expected)) append_set(key, desired);
    return table_.find(key).value_or("");
  }

  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    auto deadline = deadline_after(timeout);
    auto pause = std::chrono::milliseconds(1);
    for (;;) {
      auto missing = missing_now(keys);
      if (missing.empty()) return;
      if (std::chrono::steady_clock::now() >= deadline) throw_keys_late(missing, timeout.count());
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::milliseconds(16));
    }
  }

  bool check(const std::vector<std::string>& keys) override { return missing_now(keys).empty(); }

  bool erase(const std::string& key) override {
    Locked lock(*this);
    if (!table_.erase(key)) return false;
    append({1, static_cast<uint32_t>(key.size()), 0}, key, "");
    return true;
  }

 private:
  // The mutex and the file's lock, with the table up to date.
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
    // A forked child shares the lock of the file with its parent, so that both would hold it at once.
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

  void open_file() {
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0) fail("open");
  }

  void lock_file() {
    auto deadline = std::chrono::steady_clock::now() + kLockLimit;
    for (;;) {
      if (file_ < 0) open_file();
      struct flock whole {};
      whole.l_type = F_WRLCK;
      whole.l_whence = SEEK_SET;
      if (::fcntl(file_, F_OFD_SETLK, &whole) == 0) {
        struct stat status {};
        if (::fstat(file_, &status) != 0) fail("fstat");
        if (status.st_nlink > 0 || read_to_ > 0) return;
        // The last rank of a job removed the file between our open and our lock: ours is a new one.
        ::close(file_);
        file_ = -1;
        continue;
      }
      if (errno != EAGAIN && errno != EACCES && errno != EINTR) fail("lock");
      if (std::chrono::steady_clock::now() >= deadline)
        throw SystemError(text("store: ", path_, " has been locked by another process for ", kLockLimit.count(),
                               " s: is a rank stopped in a debugger?"));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  void unlock_file() {
    struct flock whole {};
    whole.l_type = F_UNLCK;
    whole.l_whence = SEEK_SET;
    ::fcntl(file_, F_OFD_SETLK, &whole);
  }

  bool read_at(void* data, size_t bytes, off_t offset) const {
    auto* to = static_cast<char*>(data);
    while (bytes > 0) {
      ssize_t got = ::pread(file_, to, bytes, offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("read");
      if (got == 0) return false;
      to += got;
      offset += got;
      bytes -= static_cast<size_t>(got);
    }
    return true;
  }

  void begin(off_t size) {
    std::string magic(kMagic.size(), '\0');
    if (size == 0) {
      write_at(std::string(kMagic), 0);
    } else if (!read_at(magic.data(), magic.size(), 0) || magic != kMagic) {
      throw UsageError(text("store: ", path_,
                            " exists and is not a store; file:// needs the path of a file that does not "
                            "exist yet"));
    }
    read_to_ = static_cast<off_t>(kMagic.size());
  }

  void replay() {
    struct stat status {};
    if (::fstat(file_, &status) != 0) fail("fstat");
    if (read_to_ == 0) begin(status.st_size);
    while (read_to_ < status.st_size) {
      RecordHeader header{};
      off_t body = read_to_ + static_cast<off_t>(sizeof header);
      bool whole = body <= status.st_size && read_at(&header, sizeof header, read_to_);
      uint64_t left = whole ? static_cast<uint64_t>(status.st_size - body) : 0;
      if (!whole || header.key_bytes > left || header.value_bytes > left - header.key_bytes) {
        if (::ftruncate(file_, read_to_) != 0) fail("truncate");
        return;
      }
      std::string key(header.key_bytes, '\0');
      std::string value(header.value_bytes, '\0');
      read_at(key.data(), key.size(), body);
      read_at(value.data(), value.size(), body + static_cast<off_t>(key.size()));
      header.erases ? void(table_.erase(key)) : table_.set(key, value);
      read_to_ = body + static_cast<off_t>(key.size() + value.size());
    }
  }

  void append_set(const std::string& key, const std::string& value) {
    append({0, static_cast<uint32_t>(key.size()), value.size()}, key, value);
    table_.set(key, value);
  }

  void append(const RecordHeader& header, const std::string& key, const std::string& value) {
    std::string record(reinterpret_cast<const char*>(&header), sizeof header);
    record += key;
    record += value;
    write_at(record, read_to_);
    read_to_ += static_cast<off_t>(record.size());
  }

  void write_at(const std::string& bytes, off_t offset) {
    size_t written = 0;
    while (written < bytes.size()) {
      ssize_t put =
          ::pwrite(file_, bytes.data() + written, bytes.size() - written, offset + static_cast<off_t>(written));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail("write");
      written += static_cast<size_t>(put);
    }
  }

  std::vector<std::string> missing_now(const std::vector<std::string>& keys) {
    Locked lock(*this);
    return table_.missing(keys);
  }

  const OwnerProcess owner_{};
  const std::string path_;
  std::mutex mutex_;
  int file_ = -1;      // guarded by mutex_
  off_t read_to_ = 0;  // guarded by mutex_: how much of the file is in table_
  Table table_;        // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> open_file_store(const std::string& path) {
  return make_shared_owned<FileStore>(path);
}

}  // namespace lockstep
