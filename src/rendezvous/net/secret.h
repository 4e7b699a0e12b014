#pragma once

#include <string>

#include <lockstep/environment.h>

namespace lockstep {

/// A secret has at least so many bytes.
inline constexpr size_t kSecretBytes = 32;

/// The whole contents of the file `path`, a newline at the end included. UsageError, naming the path and never the
/// contents, when it is missing, no regular file, someone else's (root's is trusted), open to others than its owner, or
/// shorter than a secret.
std::string read_secret_file(const std::string& path);

/// The same of the file "secret" in `folder`, which is created with the bytes `fresh` when it is missing: folders with
/// mode 0700, the file with 0600 and whole from the start. Of several processes at once, all get the same bytes.
/// UsageError when the folder is someone else's or open to others; SystemError when it cannot be written.
std::string read_or_create_secret_file(const std::string& folder, const std::string& fresh);

/// From the system's source for keys. SystemError when it has none.
std::string random_bytes(size_t count);

/// What the processes of one job know and nobody else: at least 32 bytes. Never printed, never in argv.
class Secret {
 public:
  Secret(const Secret&) = default;
  Secret(Secret&&) = default;
  Secret& operator=(Secret other) {
    bytes_.swap(other.bytes_);
    return *this;
  }
  ~Secret();  ///< wipes the bytes

  /// 32 fresh bytes.
  static Secret random();

  /// The bytes as they are, for a secret that came over an authenticated way. UsageError when there are less than 32.
  static Secret from_bytes(std::string bytes);

  /// The whole contents of a file, a newline at the end included: nothing is stripped. UsageError when it is missing,
  /// shorter than 32 bytes, no regular file, readable by others than its owner, or owned by another user than this one
  /// or root.
  static Secret from_file(const std::string& path);

  const std::string& bytes() const { return bytes_; }

  /// The key (32 bytes) of the job's `generation`-th start, by HKDF-SHA256: what an earlier start knows opens nothing.
  std::string key(int generation) const;

  /// HMAC-SHA256 of the message (32 bytes): whoever can compute it knows the secret.
  std::string hmac(const std::string& message) const;

 private:
  explicit Secret(std::string bytes);

  std::string bytes_;
};

/// A new folder in TMPDIR, or /tmp, that holds a job's secret in a file which only this user can read. Removed with the
/// object.
class SecretFolder {
 public:
  /// `name` begins the folder's name. SystemError when the folder cannot be created.
  explicit SecretFolder(const std::string& name);
  ~SecretFolder() { remove(path_); }
  SecretFolder(const SecretFolder&) = delete;
  SecretFolder& operator=(const SecretFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string secret_file() const { return path_ + "/secret"; }
  /// Call once. SystemError when the file cannot be written.
  void write(const Secret& secret);

  /// Removes such a folder, if it still exists: its process may have been killed.
  static void remove(const std::string& path) noexcept;

 private:
  std::string path_;
};

/// The secret of this job: the file that LOCKSTEP_SECRET_FILE names. Without it, when the job's store is on loopback,
/// a file of this user's own, created on first use (mode 0600): $XDG_STATE_HOME/lockstep/secret, else
/// $HOME/.local/state/lockstep/secret, else lockstep-UID/secret in the folder for temporary files. Beyond loopback:
/// UsageError with the remedy.
Secret find_secret(bool on_loopback, const Environment::Lookup& lookup);

}  // namespace lockstep
