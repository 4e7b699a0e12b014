#pragma once

#include <stdexcept>
#include <string>

#include <lockstep/export.h>

namespace lockstep {

/// Every error of lockstep. The message names the rank, what was expected, what was found and the remedy; catch one of
/// the kinds below to act on the difference. LibTorch's own exceptions pass through untouched.
class LOCKSTEP_EXPORT Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message);
  ~Error() override;
};

/// The program asked for something senseless: fix the call or the configuration. Nothing was sent; the group still
/// works.
class LOCKSTEP_EXPORT UsageError : public Error {
 public:
  using Error::Error;
  ~UsageError() override;
};

/// A rank is gone. The message says which, where and how. The group cannot be used any more.
class LOCKSTEP_EXPORT PeerError : public Error {
 public:
  using Error::Error;
  ~PeerError() override;
};

/// A call did not finish in time. The message says who is late and in which call. When a collective throws it, the
/// group cannot be used any more; a store and monitored_barrier go on.
class LOCKSTEP_EXPORT TimeoutError : public Error {
 public:
  using Error::Error;
  ~TimeoutError() override;
};

/// Ranks disagree about what they are doing. The message says both sides.
class LOCKSTEP_EXPORT MismatchError : public Error {
 public:
  using Error::Error;
  ~MismatchError() override;
};

/// A checkpoint cannot be read or written. The message says which file and which record.
class LOCKSTEP_EXPORT CheckpointError : public Error {
 public:
  using Error::Error;
  ~CheckpointError() override;
};

/// The operating system refused something. The message names the call, the object and the reason.
class LOCKSTEP_EXPORT SystemError : public Error {
 public:
  using Error::Error;
  ~SystemError() override;
};

}  // namespace lockstep
