#include "rendezvous/net/secret.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <memory>
#include <utility>

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#include <lockstep/error.h>

#include "base/private_files.h"
#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/net/socket.h"

namespace lockstep {
namespace {

constexpr const char* kName = "secret";
constexpr mode_t kOthers = 077;

[[noreturn]] void fail_secret_file(const std::string& call, const std::string& path) {
  throw SystemError(text(call, " ", path, ": ", std::strerror(errno),
                         "; set LOCKSTEP_SECRET_FILE to a secret file, or XDG_STATE_HOME to a writable folder"));
}

std::string in_octal(mode_t mode) {
  return text("0", std::oct, mode & 07777);
}

struct stat status_of(const FileDescriptor& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail_secret_file("fstat", path);
  return status;
}

/// O_NONBLOCK, so that open() does not block on a pipe or a device.
constexpr int kToRead = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

std::string read_checked(const FileDescriptor& file, const std::string& path) {
  const auto status = status_of(file, path);
  if (!S_ISREG(status.st_mode))
    throw UsageError(text("secret file ", path, " is not a regular file: put the secret into one"));
  if (status.st_uid != ::geteuid() && status.st_uid != 0)
    throw UsageError(text("secret file ", path, " belongs to user ", status.st_uid, ", who is neither this user (",
                          ::geteuid(), ") nor root: use a file of your own"));
  if ((status.st_mode & kOthers) != 0)
    throw UsageError(text("secret file ", path, " has mode ", in_octal(status.st_mode),
                          ", so users other than its owner can access it: chmod 600 ", path));
  std::string bytes(static_cast<size_t>(status.st_size), '\0');
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = ::read(file.get(), bytes.data() + have, bytes.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_secret_file("read", path);
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  bytes.resize(have);
  if (have < kSecretBytes)
    throw UsageError(text("secret file ", path, " has ", have, " bytes; a secret needs at least ", kSecretBytes,
                          ": head -c 32 /dev/urandom > ", path));
  return bytes;
}

void make_private_folders(const std::string& folder) {
  for (auto slash = folder.find('/', 1);; slash = folder.find('/', slash + 1)) {
    const std::string part = folder.substr(0, slash);
    if (::mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) {
      struct stat status {};
      const int error = errno;  // mkdir may fail for other reasons although the folder exists
      if (::stat(part.c_str(), &status) != 0) {
        errno = error;
        fail_secret_file("mkdir", part);
      }
    }
    if (slash == folder.npos) return;
  }
}

void write_secret(const FileDescriptor& file, const std::string& bytes, const std::string& path) {
  const char* from = bytes.data();
  size_t left = bytes.size();
  while (left > 0) {
    const ssize_t put = ::write(file.get(), from, left);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_secret_file("write", path);
    from += put;
    left -= static_cast<size_t>(put);
  }
  if (::fsync(file.get()) != 0) fail_secret_file("fsync", path);  // after a crash the file must not be empty
}

/// Removes a name from a folder on destruction.
struct TemporaryName {
  const FileDescriptor& folder;
  std::string name;
  ~TemporaryName() { ::unlinkat(folder.get(), name.c_str(), 0); }
};

/// Writes a temporary file and links it to the final name. If another process was first, its complete file is kept.
void create_secret(const FileDescriptor& folder, const std::string& path, const std::string& bytes) {
  std::string name;
  FileDescriptor file;
  for (int attempt = 0; !file.is_open(); ++attempt) {  // EEXIST: left by a killed process with the same pid
    name = text(kName, ".", ::getpid(), ".", attempt);
    file = FileDescriptor(::openat(folder.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file.is_open() && errno != EEXIST) fail_secret_file("create", path);
  }
  const TemporaryName temporary{folder, name};
  write_secret(file, bytes, path);
  if (::linkat(folder.get(), name.c_str(), folder.get(), kName, 0) != 0 && errno != EEXIST)
    fail_secret_file("link", path);
}

}  // namespace

Secret Secret::from_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), kToRead));
  if (!file.is_open() && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EIO))
    fail_secret_file("open", path);
  if (!file.is_open())
    throw UsageError(text("secret file ", path, " cannot be opened: ", std::strerror(errno),
                          "; check LOCKSTEP_SECRET_FILE. To create a secret: (umask 077 && head -c 32 /dev/urandom > ",
                          path, ")"));
  return Secret(read_checked(file, path));
}

Secret Secret::from_own_file(const std::string& folder) {
  make_private_folders(folder);
  const auto opened = open_private_folder(folder, "set LOCKSTEP_SECRET_FILE to a secret file");
  const std::string path = text(folder, "/", kName);
  for (;;) {
    const FileDescriptor file(::openat(opened.get(), kName, kToRead | O_NOFOLLOW));
    if (file.is_open()) return Secret(read_checked(file, path));
    if (errno != ENOENT) fail_secret_file("open", path);
    create_secret(opened, path, Secret::random().bytes());
  }
}

namespace {

[[noreturn]] void fail_openssl(const std::string& call) {
  const char* reason = ::ERR_reason_error_string(::ERR_get_error());
  throw SystemError(text("OpenSSL: ", call, ": ", reason ? reason : "no reason given"));
}

std::optional<std::string> nonempty(const Environment::Lookup& lookup, const std::string& variable) {
  auto value = lookup(variable);
  return value && !value->empty() ? value : std::nullopt;
}

/// Returns the folder of the per-user secret. The XDG specification requires relative paths to be ignored.
std::string own_folder(const Environment::Lookup& lookup) {
  if (auto state = nonempty(lookup, "XDG_STATE_HOME"); state && state->front() == '/') return *state + "/lockstep";
  if (auto home = nonempty(lookup, "HOME"); home && home->front() == '/') return *home + "/.local/state/lockstep";
  return text(nonempty(lookup, "TMPDIR").value_or("/tmp"), "/lockstep-", ::geteuid());
}

}  // namespace

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  if (::RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(bytes.size())) != 1)
    fail_openssl("RAND_bytes");
  return bytes;
}

Secret::Secret(std::string bytes) : bytes_(std::move(bytes)) {
  if (bytes_.size() < kSecretBytes)
    throw UsageError(
        text("a secret of ", bytes_.size(), " bytes is too short: it needs at least ", kSecretBytes, " random bytes"));
}

Secret::~Secret() {
  ::OPENSSL_cleanse(bytes_.data(), bytes_.size());
}

Secret Secret::random() {
  return Secret(random_bytes(kSecretBytes));
}

Secret Secret::from_bytes(std::string bytes) {
  return Secret(std::move(bytes));
}

Secret Secret::key(int generation) const {
  const std::unique_ptr<EVP_KDF, decltype(&::EVP_KDF_free)> kdf(::EVP_KDF_fetch(nullptr, "HKDF", nullptr),
                                                                &::EVP_KDF_free);
  const std::unique_ptr<EVP_KDF_CTX, decltype(&::EVP_KDF_CTX_free)> context(
      kdf ? ::EVP_KDF_CTX_new(kdf.get()) : nullptr, &::EVP_KDF_CTX_free);
  if (!context) fail_openssl("HKDF");
  // OSSL_PARAM takes non-const pointers, but OpenSSL does not write through them here.
  std::string digest = "SHA256";
  std::string info = text("lockstep store 1 generation ", generation);
  auto& bytes = const_cast<std::string&>(bytes_);
  const OSSL_PARAM parameters[] = {::OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest.data(), 0),
                                   ::OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, bytes.data(), bytes.size()),
                                   ::OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info.data(), info.size()),
                                   ::OSSL_PARAM_construct_end()};
  std::string key(32, '\0');
  if (::EVP_KDF_derive(context.get(), reinterpret_cast<unsigned char*>(key.data()), key.size(), parameters) != 1)
    fail_openssl("HKDF");
  return Secret(std::move(key));
}

std::string Secret::hmac(const std::string& message) const {
  std::string digest(32, '\0');
  unsigned int bytes = 0;
  if (!::HMAC(::EVP_sha256(), bytes_.data(), static_cast<int>(bytes_.size()),
              reinterpret_cast<const unsigned char*>(message.data()), message.size(),
              reinterpret_cast<unsigned char*>(digest.data()), &bytes) ||
      bytes != digest.size())
    fail_openssl("HMAC");
  return digest;
}

namespace {

constexpr auto kSurelyLocked = std::chrono::minutes(1);  // a folder of this age has been locked if it is in use

/// Removes folders of this user whose process was killed. The kernel has released their locks.
void remove_abandoned(const std::string& parent, const std::string& beginning) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::opendir(parent.c_str()), &::closedir);
  if (!listing) return;
  while (const auto* entry = ::readdir(listing.get())) {
    const std::string name = entry->d_name, path = parent + "/" + name;
    if (!name.starts_with(beginning) || name.size() != beginning.size() + 6) continue;
    const FileDescriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    struct stat status {};
    if (!folder.is_open() || ::fstat(folder.get(), &status) != 0 || status.st_uid != ::geteuid() ||
        (status.st_mode & 07777) != 0700)
      continue;
    const auto age = std::chrono::seconds(std::time(nullptr) - status.st_mtim.tv_sec);
    if (age > kSurelyLocked && ::flock(folder.get(), LOCK_EX | LOCK_NB) == 0) SecretFolder::remove(path);
  }
}

}  // namespace

SecretFolder::SecretFolder(const std::string& name) {
  const char* variable = std::getenv("TMPDIR");
  const std::string parent = variable && *variable ? variable : "/tmp";
  remove_abandoned(parent, name + "-");
  path_ = text(parent, '/', name, "-XXXXXX");
  if (!::mkdtemp(path_.data()))
    throw SystemError(text("mkdtemp ", path_, ": ", std::strerror(errno),
                           "; set TMPDIR to a folder that exists and that you can write to"));
  lock_ = FileDescriptor(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (lock_.is_open()) ::flock(lock_.get(), LOCK_EX | LOCK_NB);
}

void SecretFolder::write(const Secret& secret) {
  const auto& bytes = secret.bytes();
  const FileDescriptor file(::open(secret_file().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.is_open() || ::write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    throw SystemError(text("write ", secret_file(), ": ", std::strerror(errno),
                           "; set TMPDIR to a folder on a disk with free space"));
}

void SecretFolder::remove(const std::string& path) noexcept {
  for (const char* name : {"/secret", "/run", "/.run.new"}) ::unlink((path + name).c_str());
  ::rmdir(path.c_str());
}

Secret find_secret(bool on_loopback, const Environment::Lookup& lookup) {
  constexpr const char* kVariable = "LOCKSTEP_SECRET_FILE";
  if (auto path = lookup(kVariable)) {
    if (path->empty()) refuse_value(kVariable, *path, "the path of a file with the job's secret");
    return Secret::from_file(*path);
  }
  if (!on_loopback)
    throw UsageError(text(kVariable,
                          " is not set, and other hosts can connect to the rendezvous address: start the job with ",
                          "lockstep run, which creates a secret, or create a file with (umask 077 && head -c 32 ",
                          "/dev/urandom > FILE), copy it to every host and set ", kVariable, " on every rank"));
  return Secret::from_own_file(own_folder(lookup));
}

}  // namespace lockstep
