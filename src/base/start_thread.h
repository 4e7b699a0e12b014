#pragma once

#include <functional>
#include <thread>

namespace lockstep {

/// A thread that runs `body`; SystemError, naming what it was for and the remedy, when the system has none left.
std::thread start_thread(const char* purpose, std::function<void()> body);

}  // namespace lockstep
