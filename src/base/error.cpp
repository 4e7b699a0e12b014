#include <lockstep/error.h>

namespace lockstep {

Error::Error(const std::string& message) : std::runtime_error(message) {}

// Out of line, so that the type information lives in one library and a catch works across its boundary.
Error::~Error() = default;
UsageError::~UsageError() = default;
PeerError::~PeerError() = default;
TimeoutError::~TimeoutError() = default;
MismatchError::~MismatchError() = default;
CheckpointError::~CheckpointError() = default;
SystemError::~SystemError() = default;

}  // namespace lockstep
