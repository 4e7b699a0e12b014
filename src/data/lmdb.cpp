#include <lockstep/lmdb.h>

#include <fcntl.h>
#include <lmdb.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <lockstep/error.h>

#include "base/text.h"
#include "checkpoint/files.h"

namespace lockstep {
namespace lmdb {

struct CloseEnvironment {
  void operator()(MDB_env* environment) const { ::mdb_env_close(environment); }
};
struct AbortTransaction {
  void operator()(MDB_txn* transaction) const { ::mdb_txn_abort(transaction); }
};
using OpenEnvironment = std::unique_ptr<MDB_env, CloseEnvironment>;
using OpenTransaction = std::unique_ptr<MDB_txn, AbortTransaction>;

/// The memory that the file is mapped to. LMDB trusts the sizes in the file: a damaged size would lead beyond the end
/// of the file, where an access kills the process (SIGBUS).
class MappedFile {
 public:
  MappedFile() = default;
  /// `inside` is an address in the file. Without /proc, nothing is checked.
  MappedFile(const void* inside, uint64_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(inside);
    std::ifstream maps("/proc/self/maps");
    is_known_ = maps.is_open();
    for (std::string line; std::getline(maps, line);) {
      uintptr_t begin = 0, end = 0;
      uint64_t offset = 0;
      if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64, &begin, &end, &offset) != 3) continue;
      if (address < begin || address >= end) continue;
      begin_ = begin - offset;
      end_ = begin_ + bytes;
      return;
    }
  }

  bool contains(const MDB_val& value) const {
    const auto begin = reinterpret_cast<uintptr_t>(value.mv_data);
    return !is_known_ || (begin >= begin_ && begin <= end_ && value.mv_size <= end_ - begin);
  }

 private:
  bool is_known_ = false;
  uintptr_t begin_ = 0, end_ = 0;  // equal if the address is in no mapping
};

}  // namespace lmdb

namespace {

using lmdb::MappedFile;
using lmdb::OpenEnvironment;
using lmdb::OpenTransaction;
namespace fs = std::filesystem;

constexpr mdb_mode_t kDatabaseMode = 0666;  // minus the umask

// LMDB's own errors are negative and concern the file or its use; positive errors are errno values.
void check_lmdb(int result, const char* call, const fs::path& path) {
  if (result == MDB_SUCCESS) return;
  if (result < 0) throw UsageError(text(path, ": ", ::mdb_strerror(result), " (", call, ")"));
  throw SystemError(text(call, " of ", path, ": ", std::strerror(result)));
}

OpenEnvironment open_environment(const fs::path& path, unsigned flags) {
  MDB_env* created = nullptr;
  check_lmdb(::mdb_env_create(&created), "mdb_env_create", path);
  OpenEnvironment environment(created);
  check_lmdb(::mdb_env_open(created, path.c_str(), flags, kDatabaseMode), "mdb_env_open", path);
  return environment;
}

OpenTransaction begin_transaction(MDB_env* environment, unsigned flags, const fs::path& path) {
  MDB_txn* transaction = nullptr;
  check_lmdb(::mdb_txn_begin(environment, nullptr, flags, &transaction), "mdb_txn_begin", path);
  return OpenTransaction(transaction);
}

MDB_val as_value(std::string_view bytes) {
  return {bytes.size(), const_cast<char*>(bytes.data())};  // LMDB does not write to it
}

std::string_view as_text(const MDB_val& value) {
  return {static_cast<const char*>(value.mv_data), value.mv_size};
}

// Returns the key of a record: big-endian, so that keys in byte order are in numeric order.
std::string record_key(uint64_t number) {
  std::string key(8, '\0');
  for (size_t i = key.size(); i-- > 0; number >>= 8) key[i] = static_cast<char>(number & 0xff);
  return key;
}

}  // namespace

struct LmdbReader::State {
  State(const fs::path& where, LmdbOptions options) : path(where) {
    struct stat status = {};
    if (::stat(path.c_str(), &status) != 0)
      throw UsageError(text("LMDB: cannot access ", path, ": ", std::strerror(errno), "; check the path"));
    const bool is_folder = S_ISDIR(status.st_mode);
    const fs::path file = is_folder ? path / "data.mdb" : path;
    if (::stat(file.c_str(), &status) != 0 || status.st_size == 0)
      throw UsageError(text("LMDB: ", path, " is not a database: ", file, " is missing or empty; check the path"));
    environment = open_environment(path, MDB_RDONLY | MDB_NOLOCK | MDB_NOTLS | (is_folder ? 0 : MDB_NOSUBDIR) |
                                             (options.read_ahead ? 0 : MDB_NORDAHEAD));
    refuse_cut_short(file);

    auto transaction = begin_transaction(environment.get(), MDB_RDONLY, path);
    check_lmdb(::mdb_dbi_open(transaction.get(), nullptr, 0, &database), "mdb_dbi_open", path);
    MDB_stat statistics = {};
    check_lmdb(::mdb_stat(transaction.get(), database, &statistics), "mdb_stat", path);
    count = statistics.ms_entries;
    if (count > 0) find_mapping(transaction.get());
    if (count > 0 && !is_numbered(transaction.get())) read_keys(transaction.get());
    check_lmdb(::mdb_txn_commit(transaction.release()), "mdb_txn_commit", path);  // keeps the handle open
  }

  void find_mapping(MDB_txn* transaction) {
    walk(transaction, [&](MDB_cursor* cursor) {
      MDB_val key = {}, value = {};
      check_lmdb(::mdb_cursor_get(cursor, &key, &value, MDB_FIRST), "mdb_cursor_get", path);
      mapped = MappedFile(key.mv_data, file_bytes);
    });
  }

  /// The bytes of a key or a value in the file.
  std::string_view text_in_file(const MDB_val& found) const {
    if (!mapped.contains(found))
      throw UsageError(text(path, " is damaged: a record of ", found.mv_size,
                            " bytes reaches beyond the end of the file; copy it again"));
    return as_text(found);
  }

  // Refuses a truncated file: an access to a mapped page beyond the end of the file would kill the process (SIGBUS).
  void refuse_cut_short(const fs::path& file) {
    MDB_envinfo info = {};
    MDB_stat statistics = {};
    check_lmdb(::mdb_env_info(environment.get(), &info), "mdb_env_info", path);
    check_lmdb(::mdb_env_stat(environment.get(), &statistics), "mdb_env_stat", path);
    struct stat status = {};
    if (::stat(file.c_str(), &status) != 0) throw SystemError(text("stat of ", file, ": ", std::strerror(errno)));
    file_bytes = static_cast<uint64_t>(status.st_size);
    const uint64_t expected = (info.me_last_pgno + 1) * uint64_t{statistics.ms_psize};
    if (file_bytes < expected)
      throw UsageError(text(file, " is truncated: it has ", status.st_size, " bytes, expected ", expected,
                            "; copy it again, or, if this is the original, copy it with mdb_copy -c"));
  }

  // Whether the keys are the numbers 0 to count - 1. The keys are distinct and sorted, so checking the first and the
  // last suffices.
  bool is_numbered(MDB_txn* transaction) const {
    return key_at(transaction, MDB_FIRST) == record_key(0) && key_at(transaction, MDB_LAST) == record_key(count - 1);
  }

  std::string key_at(MDB_txn* transaction, MDB_cursor_op place) const {
    MDB_val key = {}, value = {};
    walk(transaction, [&](MDB_cursor* cursor) {
      check_lmdb(::mdb_cursor_get(cursor, &key, &value, place), "mdb_cursor_get", path);
    });
    return std::string(text_in_file(key));
  }

  void read_keys(MDB_txn* transaction) {
    keys.reserve(std::min<uint64_t>(count, file_bytes / kMinRecord));
    walk(transaction, [&](MDB_cursor* cursor) {
      MDB_val key = {}, value = {};
      int result = ::mdb_cursor_get(cursor, &key, &value, MDB_FIRST);
      for (; result == MDB_SUCCESS; result = ::mdb_cursor_get(cursor, &key, &value, MDB_NEXT_NODUP))
        keys.emplace_back(text_in_file(key));
      if (result != MDB_NOTFOUND) check_lmdb(result, "mdb_cursor_get", path);
    });
    count = keys.size();
  }

  template <class Use>
  void walk(MDB_txn* transaction, const Use& use) const {
    MDB_cursor* opened = nullptr;
    check_lmdb(::mdb_cursor_open(transaction, database, &opened), "mdb_cursor_open", path);
    const std::unique_ptr<MDB_cursor, void (*)(MDB_cursor*)> cursor(opened, ::mdb_cursor_close);
    use(opened);
  }

  static constexpr uint64_t kMinRecord = 10;  // bytes in the file: two of the page's list, eight of the record's header

  const fs::path path;
  OpenEnvironment environment;
  uint64_t file_bytes = 0;
  MappedFile mapped{};
  MDB_dbi database = 0;
  size_t count = 0;
  std::vector<std::string> keys{};  // empty if the keys are numbers
};

LmdbReader::LmdbReader(const fs::path& path, LmdbOptions options)
    : state_(std::make_shared<const State>(path, options)) {}

LmdbReader::~LmdbReader() = default;

size_t LmdbReader::size() const {
  return state_->count;
}

void LmdbReader::read(size_t index, const std::function<void(std::string_view, std::string_view)>& use) const {
  const State& state = *state_;
  if (index >= state.count)
    throw UsageError(
        text(state.path, ": index ", index, ", expected less than ", state.count, "; check the sampler's size"));
  const std::string key = state.keys.empty() ? record_key(index) : state.keys[index];
  const auto transaction = begin_transaction(state.environment.get(), MDB_RDONLY, state.path);
  MDB_val wanted = as_value(key), value = {};
  check_lmdb(::mdb_get(transaction.get(), state.database, &wanted, &value), "mdb_get", state.path);
  use(key, state.text_in_file(value));
}

struct LmdbWriter::State {
  // A transaction is committed at this size, to limit the number of dirty pages in memory.
  static constexpr size_t kTransactionBytes = size_t{64} << 20;

  explicit State(fs::path final_place)
      : file(std::move(final_place)), partial(text(file.native(), ".partial-", std::random_device()())) {
    if (::access(file.c_str(), F_OK) == 0)
      throw UsageError(text("LMDB: ", file, " exists already; remove it, or write to another path"));
    environment = open_environment(partial, MDB_NOSUBDIR | MDB_NOLOCK | MDB_NOSYNC);
  }
  ~State() {
    transaction.reset();
    environment.reset();
    if (!is_finished) ::unlink(partial.c_str());
  }

  // Grows the map so that the next transaction fits, including B-tree pages.
  void make_room(size_t bytes) {
    MDB_envinfo info = {};
    MDB_stat statistics = {};
    check_lmdb(::mdb_env_info(environment.get(), &info), "mdb_env_info", file);
    check_lmdb(::mdb_env_stat(environment.get(), &statistics), "mdb_env_stat", file);
    const size_t used = (info.me_last_pgno + 1) * size_t{statistics.ms_psize};
    const size_t needed = used + 4 * (kTransactionBytes + bytes);
    if (needed > info.me_mapsize)
      check_lmdb(::mdb_env_set_mapsize(environment.get(), std::max(needed, 2 * size_t{info.me_mapsize})),
                 "mdb_env_set_mapsize", file);
  }

  void put(std::string_view value) {
    if (transaction && uncommitted + value.size() > kTransactionBytes) commit();
    if (!transaction) {
      make_room(value.size());
      transaction = begin_transaction(environment.get(), 0, file);
      check_lmdb(::mdb_dbi_open(transaction.get(), nullptr, 0, &database), "mdb_dbi_open", file);
    }
    const std::string number = record_key(count);
    MDB_val key = as_value(number), data = as_value(value);
    check_lmdb(::mdb_put(transaction.get(), database, &key, &data, MDB_APPEND), "mdb_put", file);
    uncommitted += value.size() + number.size();
    ++count;
  }

  void commit() {
    is_broken = true;  // if the commit throws, added records may be lost
    if (transaction) check_lmdb(::mdb_txn_commit(transaction.release()), "mdb_txn_commit", file);
    is_broken = false;
    uncommitted = 0;
  }

  void require_whole() const {
    if (is_broken) throw UsageError(text(file, ": an earlier write failed; start again with a new writer"));
  }

  void finish() {
    commit();
    check_lmdb(::mdb_env_sync(environment.get(), 1), "mdb_env_sync", file);
    environment.reset();
    is_finished = is_broken = true;  // the file is complete: keep it even if the rename fails
    int result = ::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, file.c_str(), RENAME_NOREPLACE);
    if (result != 0 && errno == EINVAL) {  // the file system does not support RENAME_NOREPLACE
      result = ::link(partial.c_str(), file.c_str());
      if (result == 0) ::unlink(partial.c_str());
    }
    if (result != 0)
      throw SystemError(text("rename to ", file, ": ", std::strerror(errno), "; all added records are in ", partial));
    detail::sync_folder(detail::folder_of(file.string()));
    is_broken = false;
  }

  const fs::path file;
  const fs::path partial;
  OpenEnvironment environment;
  OpenTransaction transaction;
  MDB_dbi database = 0;
  size_t count = 0;
  size_t uncommitted = 0;  // bytes
  bool is_finished = false;
  bool is_broken = false;
};

LmdbWriter::LmdbWriter(fs::path file) : state_(std::make_unique<State>(std::move(file))) {}

LmdbWriter::~LmdbWriter() = default;

void LmdbWriter::add(std::string_view value) {
  state_->require_whole();
  if (!state_->environment) throw UsageError(text(state_->file, " is finished; call add() before finish()"));
  if (value.size() > std::numeric_limits<uint32_t>::max())
    throw UsageError(text(state_->file, ": a record of ", value.size(), " bytes, expected at most 4 GiB"));
  state_->put(value);
}

size_t LmdbWriter::size() const {
  return state_->count;
}

void LmdbWriter::finish() {
  state_->require_whole();
  if (state_->environment) state_->finish();
}

}  // namespace lockstep
