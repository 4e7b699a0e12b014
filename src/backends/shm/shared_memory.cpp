#include "backends/shm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <sstream>

#include <lockstep/error.h>

#include "base/align.h"
#include "base/text.h"

namespace lockstep::shm {
namespace {

constexpr const char* kNamePrefix = "shm:";

/// The mappings of this process, by id. Ranks that are threads, and groups with common members, share mappings, because
/// address space is limited.
struct Mapped {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<SharedMemory>> by_id;  // guarded by mutex
};

Mapped& mapped() {
  static Mapped instance;
  return instance;
}

std::string random_id() {
  std::random_device random;
  std::ostringstream id;
  id << std::hex;
  for (int word = 0; word < 4; ++word) id << random();
  return id.str();
}

[[noreturn]] void fail(const std::string& what, int error) {
  throw SystemError(text(what, ": ", std::strerror(error)));
}

std::string advice() {
  struct statvfs shm {};
  std::string room = "unknown";
  if (::statvfs("/dev/shm", &shm) == 0) room = text(shm.f_bavail * shm.f_frsize >> 20, " MiB");
  return text(" (/dev/shm has ", room,
              " free; in a container pass --shm-size or --ipc=host, or use another backend: backend = \"gloo\")");
}

FileDescriptor create_file(SharedMemory::Kind kind, const std::string& name) {
  if (kind == SharedMemory::Kind::kUnnamed) {
    FileDescriptor file(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!file.is_open()) fail("memfd_create: cannot create shared memory", errno);
    return file;
  }
  FileDescriptor file(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.is_open()) fail(text("shm_open: cannot create shared memory ", name, advice()), errno);
  return file;
}

/// Removes the name of shared memory that could not be mapped.
struct NameUntilMapped {
  std::string name;
  ~NameUntilMapped() {
    if (!name.empty()) ::shm_unlink(name.c_str());
  }
};

// A POSIX record lock belongs to the process, not to the open file. A forked child does not inherit the lock. The
// kernel releases the lock when the process ends or closes the file.
struct flock lock_of_all() {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

bool lock_for_this_process(const FileDescriptor& file) {
  auto lock = lock_of_all();
  return ::fcntl(file.get(), F_SETLK, &lock) == 0;
}

FileDescriptor open_file(const std::string& path) {
  bool is_named = path.starts_with(kNamePrefix);
  std::string name = is_named ? path.substr(std::string(kNamePrefix).size()) : path;
  FileDescriptor file(is_named ? ::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0)
                               : ::open(name.c_str(), O_RDWR | O_CLOEXEC));
  if (!file.is_open()) fail(text("cannot open shared memory ", path), errno);
  return file;
}

}  // namespace

std::shared_ptr<SharedMemory> SharedMemory::create(Kind kind, size_t bytes) {
  std::string id = random_id();
  std::string name = "/lockstep-" + id;
  FileDescriptor file = create_file(kind, name);
  NameUntilMapped until_mapped{kind == Kind::kNamed ? name : ""};
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
    fail(text("ftruncate: cannot create ", bytes, " bytes of shared memory", advice()), errno);
  // Without the seal another process could shrink the file, and accesses to the mappings would raise SIGBUS.
  if (kind == Kind::kUnnamed) ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK);
  std::string path = kind == Kind::kUnnamed ? text("/proc/", ::getpid(), "/fd/", file.get()) : kNamePrefix + name;
  const bool is_locked = lock_for_this_process(file);
  auto memory = std::make_shared<SharedMemory>(std::move(file), MemoryHandle{path, id, bytes, is_locked});
  memory->is_created_here_ = true;
  until_mapped.name.clear();
  std::lock_guard lock(mapped().mutex);
  mapped().by_id[id] = memory;
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::open(const MemoryHandle& address) {
  std::lock_guard lock(mapped().mutex);
  if (auto known = mapped().by_id[address.id].lock()) return known;
  auto memory = std::make_shared<SharedMemory>(open_file(address.path), address);
  mapped().by_id[address.id] = memory;
  return memory;
}

SharedMemory::SharedMemory(FileDescriptor file, MemoryHandle address)
    : file_(std::move(file)), handle_(std::move(address)) {
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0 || static_cast<size_t>(status.st_size) != handle_.bytes)
    throw UsageError(text("shared memory ", handle_.path, " has ", status.st_size, " bytes, expected ", handle_.bytes,
                          ": the path now belongs to another process"));
  void* mapping = ::mmap(nullptr, handle_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  if (mapping == MAP_FAILED)
    fail(
        text("mmap: cannot map ", handle_.bytes >> 20,
             " MiB of shared memory (address space only); raise `ulimit -v`, or lower LOCKSTEP_SHM_BYTES on all ranks"),
        errno);
  begin_ = static_cast<char*>(mapping);
  ::madvise(begin_, handle_.bytes, MADV_HUGEPAGE);  // if the kernel allows it for shared memory
}

SharedMemory::~SharedMemory() {
  if (is_created_here_) unlink();
  ::munmap(begin_, handle_.bytes);
  std::lock_guard lock(mapped().mutex);
  auto known = mapped().by_id.find(handle_.id);
  if (known != mapped().by_id.end() && known->second.expired()) mapped().by_id.erase(known);
}

void SharedMemory::populate(size_t offset, size_t bytes) {
  auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  size_t from = offset / page * page;
  size_t size = offset + bytes - from;
#ifdef MADV_POPULATE_WRITE
  if (::madvise(begin_ + from, size, MADV_POPULATE_WRITE) == 0) return;
  int error = errno == EFAULT ? ENOSPC : errno;
#else
  int error = EINVAL;
#endif
  if (error == EINVAL)  // kernels before 5.14
    error = ::posix_fallocate(file_.get(), static_cast<off_t>(from), static_cast<off_t>(size));
  if (error != 0) fail(text("no room for ", bytes, " bytes of shared memory", advice()), error);
}

void SharedMemory::release(size_t offset, size_t bytes) {
  auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  size_t from = align_up(offset, page);
  size_t to = (offset + bytes) / page * page;
  if (from < to) ::madvise(begin_ + from, to - from, MADV_REMOVE);
}

void SharedMemory::detach(size_t offset, size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t from = offset / page * page;
  const size_t size = (offset + bytes + page - 1) / page * page - from;
  void* own = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED) fail(text("mmap of ", size, " bytes"), errno);
  std::memcpy(own, begin_ + from, size);
  if (::mremap(own, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, begin_ + from) != MAP_FAILED) return;
  const int error = errno;
  ::munmap(own, size);
  fail(text("mremap of ", size, " bytes"), error);
}

bool SharedMemory::is_in_use() const {
  if (is_created_here_ || !handle_.is_locked) return true;
  auto lock = lock_of_all();
  return ::fcntl(file_.get(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void SharedMemory::unlink() {
  if (handle_.path.starts_with(kNamePrefix)) ::shm_unlink(handle_.path.substr(std::string(kNamePrefix).size()).c_str());
}

}  // namespace lockstep::shm
