#pragma once

#include <stdexcept>
#include <string>

#include <lockstep/export.h>

namespace lockstep {

/// The kind of an Error as data, for logs and for code that passes errors on. One value for each class below.
enum class ErrorKind { kError, kUsage, kPeer, kTimeout, kMismatch, kCheckpoint, kSystem };

/// "PeerError", "TimeoutError": the name of the class.
LOCKSTEP_EXPORT const char* name_of(ErrorKind kind);

/// Base class of all errors that lockstep throws. The message names the rank, the expected and the actual value, and
/// the remedy. Catch a derived class to handle one kind. Exceptions of LibTorch itself pass through unchanged.
class LOCKSTEP_EXPORT Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  ~Error() override;
  virtual ErrorKind kind() const noexcept;
};

/// The program made an invalid call or set an invalid option. Nothing was sent. The group still works.
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
/// the group is broken. After a TimeoutError of a store or of monitored_barrier, the store or the group still works.
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
