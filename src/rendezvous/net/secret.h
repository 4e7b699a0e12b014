#pragma once

#include <string>

#include <lockstep/environment.h>

#include "base/file_descriptor.h"

namespace lockstep {

/// The minimum size of a secret.
inline constexpr size_t kSecretBytes = 32;

/// Returns cryptographically secure random bytes. Throws SystemError if OpenSSL has none.
std::string random_bytes(size_t count);

/// The secret shared by the processes of one job, or a key derived from it: at least 32 bytes. It is never printed and
/// never passed in argv. The memory is wiped when it is freed.
class Secret {
 public:
  Secret(const Secret&) = default;
  Secret(Secret&&) = default;
  Secret& operator=(Secret other) {
    bytes_.swap(other.bytes_);
    return *this;
  }
  ~Secret();

  /// Returns 32 new random bytes.
  static Secret random();

  /// Uses the bytes unchanged, for a secret received over an authenticated connection. Throws UsageError for less than
  /// 32 bytes.
  static Secret from_bytes(std::string bytes);

  /// Uses the contents of a file, including a trailing newline. Throws UsageError if the file is missing, is not a
  /// regular file, belongs to a user other than this one or root, is accessible to other users, or is shorter than
  /// kSecretBytes. The message has the path, never the contents.
  static Secret from_file(const std::string& path);

  /// The same for the file "secret" in `folder`. If it is missing, creates the folders (mode 0700) and, atomically, the
  /// file (mode 0600) with a random secret. Processes that do this concurrently all return the same secret. Throws
  /// UsageError if the folder belongs to another user or is accessible to other users, SystemError if it cannot be
  /// written.
  static Secret from_own_file(const std::string& folder);

  const std::string& bytes() const { return bytes_; }

  /// Derives the key (32 bytes) of a generation, that is, of one start of the job, by HKDF-SHA256. A key of an earlier
  /// generation is not accepted by a later one.
  Secret key(int generation) const;

  /// Returns the HMAC-SHA256 of the message under the secret (32 bytes).
  std::string hmac(const std::string& message) const;

 private:
  explicit Secret(std::string bytes);

  std::string bytes_;
};

/// A new folder in TMPDIR, or /tmp, that holds a job's secret in a file which only this user can read. Removed with the
/// object. If the process is killed, the next SecretFolder of the user removes it.
class SecretFolder {
 public:
  /// `name` begins the folder's name. SystemError when the folder cannot be created.
  explicit SecretFolder(const std::string& name);
  ~SecretFolder() { remove(path_); }
  SecretFolder(const SecretFolder&) = delete;
  SecretFolder& operator=(const SecretFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string secret_file() const { return path_ + "/secret"; }
  /// Another file that the folder may have: see LOCKSTEP_RUN_NOTE.
  static std::string note_file(const std::string& path) { return path + "/run"; }
  /// Call once. SystemError when the file cannot be written.
  void write(const Secret& secret);

  /// Removes such a folder, if it still exists: its process may have been killed.
  static void remove(const std::string& path) noexcept;

 private:
  std::string path_;
  FileDescriptor lock_;  // of the folder: held as long as the folder is in use
};

/// Returns the secret of this job from the file that LOCKSTEP_SECRET_FILE names. If it is not set and the job's store
/// is on loopback, uses a per-user file that is created on first use (mode 0600): $XDG_STATE_HOME/lockstep/secret, else
/// $HOME/.local/state/lockstep/secret, else $TMPDIR/lockstep-UID/secret (/tmp without TMPDIR). Throws UsageError if it
/// is not set and the store is not on loopback.
Secret find_secret(bool on_loopback, const Environment::Lookup& lookup);

}  // namespace lockstep
