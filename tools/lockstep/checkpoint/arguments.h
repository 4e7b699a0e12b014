#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::checkpoint {

/// The command line of `lockstep checkpoint`, and of its helper program lockstep-checkpoint, which does the work.
struct Arguments {
  std::string command{};             // "ls"
  std::vector<std::string> paths{};  // of ls and verify
  std::string first{};               // FILE, A, IN or DIR
  std::string second{};              // B or OUT
  std::string tensor_glob{};         // show; empty: all tensors
  double tolerance = 0;              // diff
  std::string key{};                 // convert; empty: the whole value
  bool force = false;                // convert: replace OUT
  int64_t keep_last = 0;             // prune
  int64_t keep_every = 0;            // prune; 0: not given
  bool dry_run = false;              // prune
  bool json = false;

  bool operator==(const Arguments&) const = default;
};

/// Adds ls, show, verify, diff, convert and prune to `app`. Parsing a command line fills `arguments`.
void add_checkpoint_commands(CLI::App& app, Arguments& arguments);

/// The words that parse as `arguments`.
std::vector<std::string> to_words(const Arguments& arguments);

}  // namespace lockstep::checkpoint
