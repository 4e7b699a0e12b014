#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

/// Takes the program and its arguments off the end of `arguments` (what follows "run"), so that nothing in them is read
/// as an option of ours: they begin at the first that is neither an option of `run` nor an option's value, or behind
/// "--". What remains has '-' in the names of options where '_' was written, as torchrun allows, and the streams of
/// --tee and --redirects, which may be left out, joined by '='.
/// Throws CLI::ParseError with the nearest suggestion for an option that is none.
std::vector<std::string> cut_program(const CLI::App& run, std::vector<std::string>& arguments);
