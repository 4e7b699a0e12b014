#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/export.h>

namespace lockstep {

/// Describes DistributedDataParallel on this rank: its buckets, and the times of the last measured step. Times of
/// buckets are in milliseconds since the first gradient of backward.
///
/// On the CPU every step is measured. On a GPU the times are those of the device, and the first 8 steps and every 16th
/// step are measured, but no step inside a CapturedStep. With LibTorch before 2.5 the times of a GPU step are the times
/// at which the host queued the work.
struct LOCKSTEP_EXPORT DdpLoggingData {
  struct Bucket {
    size_t gradients = 0;
    int64_t bytes = 0;
    double full_ms = 0;     ///< its last gradient arrived
    double started_ms = 0;  ///< its reduction started
    double reduced_ms = 0;  ///< its reduction finished
  };

  int rank = 0;
  int world_size = 1;
  std::string backend{};
  std::string module{};
  size_t parameters = 0;
  int64_t bytes = 0;  ///< total size of all gradients
  bool is_static_graph = false;
  int64_t steps = 0;          ///< number of reductions so far
  int64_t measured_step = 0;  ///< number of the step that the times describe; 0 and no times before the first
  double forward_ms = 0;      ///< duration of the wrapper's forward; 0 if the module's own forward was called
  double backward_ms = 0;
  double exposed_ms = 0;          ///< part of backward_ms after the last gradient was computed: waiting for reductions
  double reduction_ms = 0;        ///< part of backward_ms in which some reduction was running
  double overlap = 0;             ///< fraction of reduction_ms in which backward computed, from 0 to 1
  std::vector<Bucket> buckets{};  ///< in the order in which they are reduced

  /// Returns a human-readable summary: one line, then a table of the buckets.
  std::string to_table() const;
};

}  // namespace lockstep
