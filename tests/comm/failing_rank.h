#pragma once

#include <string>

/// A rank of failures_test.cpp: runs the scenario with what the environment says, prints what it comes to, one line
/// each, and returns the exit code.
int run_failing_rank(const std::string& scenario);
