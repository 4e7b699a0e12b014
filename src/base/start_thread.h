#pragma once

#include <functional>
#include <thread>

namespace lockstep {

/// A thread that runs `body`; SystemError, naming what it was for and the remedy, when the system has none left.
std::thread start_thread(const char* purpose, std::function<void()> body);

/// Call this before making what will need run_in_background when it goes: then even a static variable that holds it
/// goes while the end of the process still waits.
void prepare_background();

/// Runs `body`, which throws nothing, on a thread that nobody waits for but the end of the process, and that not for
/// long; once it has waited, nothing is run any more. SystemError when the system has no thread left.
void run_in_background(const char* purpose, std::function<void()> body);

}  // namespace lockstep
