#pragma once

#include "checkpoint/arguments.h"

namespace lockstep::checkpoint {

// Each function carries out one command, prints its result to stdout, and returns the exit code. They throw UsageError,
// CheckpointError and SystemError.

int run_ls(const Arguments& arguments);
int run_show(const Arguments& arguments);
int run_verify(const Arguments& arguments);
int run_diff(const Arguments& arguments);
int run_convert(const Arguments& arguments);
int run_prune(const Arguments& arguments);

/// Parses a command line, carries it out and returns the exit code. Prints errors to stderr, each as one line.
int run_checkpoint_program(int argc, const char* const* argv);

}  // namespace lockstep::checkpoint
