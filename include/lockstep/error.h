#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include <lockstep/export.h>

namespace lockstep {

/// The kind of an Error as data, for logs and for code that passes errors on. One value for each class below.
enum class ErrorKind { kError, kUsage, kPeer, kTimeout, kMismatch, kCheckpoint, kSystem };

/// "PeerError", "TimeoutError": the name of the class.
LOCKSTEP_EXPORT const char* name_of(ErrorKind kind);

/// How a rank caused the failure of other ranks.
enum class CulpritRole {
  kGone,     ///< the store lost its connection
  kSilent,   ///< it sent no heartbeat: its process is stopped, or its host or network is down
  kExited,   ///< its launcher saw its process end
  kGaveUp,   ///< it reported its own error
  kLeft,     ///< it left a group regularly while other ranks still used it
  kLate,     ///< it did not make a call in time
  kDiffers,  ///< its call differs from the calls of all other ranks
};

/// The rank that caused an error, and how.
struct Culprit {
  int rank = 0;  ///< rank in the job
  CulpritRole role = CulpritRole::kGone;

  bool operator==(const Culprit&) const = default;
};

/// Base class of all errors that lockstep throws. The message names, where known, the rank, the expected and the actual
/// value, and the remedy. Catch a derived class to handle one kind. Exceptions of LibTorch itself pass through
/// unchanged.
class LOCKSTEP_EXPORT Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  /// The message becomes "rank 3: message". A message that begins with this rank already stays as it is.
  Error(int rank, const std::string& message);
  /// Keeps the message as it is.
  Error(const std::string& message, std::optional<int> rank, std::optional<Culprit> culprit);
  ~Error() override;

  virtual ErrorKind kind() const noexcept;
  /// The rank that the message begins with, usually the rank whose call failed. In a subgroup it is the rank in that
  /// group.
  std::optional<int> rank() const noexcept { return rank_; }
  /// The rank that caused the error, if it is known. When several ranks are late, it is the lowest of them.
  std::optional<Culprit> culprit() const noexcept { return culprit_; }

 private:
  std::optional<int> rank_;
  std::optional<Culprit> culprit_;
};

/// The program made an invalid call or set an invalid option. If a call of ProcessGroup refuses an argument, nothing
/// was sent and the group still works. Other functions document the state that they leave.
class LOCKSTEP_EXPORT UsageError : public Error {
 public:
  using Error::Error;
  ~UsageError() override;
  ErrorKind kind() const noexcept override;
};

/// A rank is gone. The message names the rank, its host and the reason. The group is broken.
class LOCKSTEP_EXPORT PeerError : public Error {
 public:
  using Error::Error;
  ~PeerError() override;
  ErrorKind kind() const noexcept override;
};

/// A call did not finish in time. The message names the late ranks and the call. After a TimeoutError of a collective
/// the group is broken. After a TimeoutError of a store, of monitored_barrier or of recv_any, the store or the group
/// still works.
class LOCKSTEP_EXPORT TimeoutError : public Error {
 public:
  using Error::Error;
  ~TimeoutError() override;
  ErrorKind kind() const noexcept override;
};

/// Ranks disagree, for example about a call, a model or an option. The message shows both sides.
class LOCKSTEP_EXPORT MismatchError : public Error {
 public:
  using Error::Error;
  ~MismatchError() override;
  ErrorKind kind() const noexcept override;
};

/// A checkpoint cannot be read or written. The message names the file and the record.
class LOCKSTEP_EXPORT CheckpointError : public Error {
 public:
  using Error::Error;
  ~CheckpointError() override;
  ErrorKind kind() const noexcept override;
};

/// A system call failed. The message names the call, the object and the reason.
class LOCKSTEP_EXPORT SystemError : public Error {
 public:
  using Error::Error;
  ~SystemError() override;
  ErrorKind kind() const noexcept override;
};

}  // namespace lockstep
