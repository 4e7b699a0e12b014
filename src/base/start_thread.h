#pragma once

#include <functional>
#include <thread>

namespace lockstep {

/// A thread that runs `body`; SystemError, naming what it was for and the remedy, when the system has none left.
std::thread start_thread(const char* purpose, std::function<void()> body);

/// Nobody waits for this thread but the end of the process.
void join_at_exit(std::thread thread);

}  // namespace lockstep
