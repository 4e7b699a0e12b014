#pragma once

#include <functional>
#include <thread>

namespace lockstep {

/// Starts a thread that runs `body`. Throws SystemError, with the purpose and the remedy, if no thread can be started.
std::thread start_thread(const char* purpose, std::function<void()> body);

/// Call this before creating an object whose destructor uses run_in_background(). Then process exit waits for the
/// background threads even if a static variable holds the object.
void prepare_background();

/// Runs `body`, which must not throw, on a detached thread. Only process exit waits for it, for up to 2 s; calls after
/// that wait do nothing. Throws SystemError if no thread can be started.
void run_in_background(const char* purpose, std::function<void()> body);

}  // namespace lockstep
