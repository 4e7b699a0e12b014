#pragma once

#include <string>

namespace lockstep::bench {

/// How the ranks are to measure, whatever it is.
struct RunPlan {
  int ranks = 2;
  int rounds = 0;  // 0: as many as fit into about a minute in all, 5 at least
  bool check = true;
  bool bind = false;        // give each rank cores of its own
  bool is_crowded = false;  // more ranks than cores: who waits lets others run at once
  std::string page{};       // a file of page_bytes(ranks), zeros, that all ranks map
  std::string results{};    // a file that rank 0 writes to, a line of JSON for each message

  bool operator==(const RunPlan&) const = default;
};

}  // namespace lockstep::bench
