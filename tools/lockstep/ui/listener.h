#pragma once

#include <string>

#include "base/file_descriptor.h"

namespace lockstep::ui {

/// Returns a nonblocking socket that listens on this address and port (0: any free one). No other user can listen on
/// the same port, because SO_REUSEPORT is not set. Throws SystemError with the reason and the remedy.
FileDescriptor listen_on(const std::string& address, int port);

/// The port that a socket listens on.
int port_of(const FileDescriptor& listener);

}  // namespace lockstep::ui
