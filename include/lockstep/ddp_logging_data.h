#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/export.h>

namespace lockstep {

/// What DistributedDataParallel does on this rank: how gradients are bundled, and when things happened in the last
/// step. Times are milliseconds since the first gradient of backward.
struct LOCKSTEP_EXPORT DdpLoggingData {
  struct Bucket {
    size_t gradients = 0;
    int64_t bytes = 0;
    double full_ms = 0;     // its last gradient came
    double started_ms = 0;  // its reduction was handed over
    double reduced_ms = 0;  // its reduction was done
  };

  int rank = 0;
  int world_size = 1;
  std::string backend{};
  std::string module{};
  size_t parameters = 0;
  int64_t bytes = 0;  // of all gradients
  bool is_static_graph = false;
  int64_t steps = 0;      // reductions so far; all times are zero before the first
  double forward_ms = 0;  // of the wrapper's forward; 0 when the module's own was called
  double backward_ms = 0;
  double exposed_ms = 0;          // of which nothing was computed any more: waiting for reductions
  double reduction_ms = 0;        // of which some reduction was under way
  double overlap = 0;             // the part of reduction_ms in which backward computed, from 0 to 1
  std::vector<Bucket> buckets{};  // in the order in which they leave

  /// All of it for people: a line on the whole and a table of the buckets.
  std::string to_table() const;
};

}  // namespace lockstep
