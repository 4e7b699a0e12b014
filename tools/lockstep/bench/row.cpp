#include "bench/row.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "bench/or_null.h"
#include "bench/sizes.h"
#include "bench/statistics.h"

namespace lockstep::bench {
namespace {

using json = nlohmann::ordered_json;

}  // namespace

std::optional<double> floor_us(Operation operation, int ranks, const Floor& floor) {
  if (ranks == 1) return std::nullopt;
  const double streamed = 2.0 * ranks * static_cast<double>(floor.bytes);
  const double memory_us = streamed > 0 ? floor_traffic(operation, ranks, floor.bytes) * floor.stream_us / streamed : 0;
  return std::max(memory_us, floor.round_trip_us / 2);
}

Row make_row(const Plan& plan, const Samples& samples, const Floor& floor) {
  Row row;
  row.operation = plan.operation;
  row.backend = samples.backend;
  row.memory = samples.memory;
  row.ranks = plan.ranks;
  row.bytes = samples.bytes;
  row.dtype = plan.operation == Operation::kBarrier ? "none" : plan.dtype;
  row.redop = plan.redop;
  if (plan.operation != Operation::kBarrier)
    row.count = count_of(plan.operation, samples.bytes, element_bytes(plan.dtype), plan.ranks);
  row.time_us = median(samples.times_us);
  row.p10_us = percentile(samples.times_us, 0.1);
  row.p90_us = percentile(samples.times_us, 0.9);
  row.algbw_gbps = row.time_us > 0 ? static_cast<double>(samples.bytes) / row.time_us / 1000 : 0;
  row.busbw_gbps = row.algbw_gbps * bus_factor(plan.operation, plan.ranks);
  row.wrong = samples.wrong;
  row.floor_us = floor_us(plan.operation, plan.ranks, floor);
  if (row.floor_us && row.time_us > 0) row.floor_fraction = *row.floor_us / row.time_us;
  row.rounds = samples.times_us.size();
  row.calls = samples.calls;
  return row;
}

std::string to_json_line(const Row& row) {
  const json object{{"op", name_of(row.operation)},
                    {"backend", row.backend},
                    {"memory", row.memory},
                    {"ranks", row.ranks},
                    {"bytes", row.bytes},
                    {"count", row.count},
                    {"dtype", row.dtype},
                    {"redop", row.redop},
                    {"time_us", row.time_us},
                    {"p10_us", row.p10_us},
                    {"p90_us", row.p90_us},
                    {"algbw_gbps", row.algbw_gbps},
                    {"busbw_gbps", row.busbw_gbps},
                    {"wrong", or_null(row.wrong)},
                    {"floor_us", or_null(row.floor_us)},
                    {"floor_fraction", or_null(row.floor_fraction)},
                    {"rounds", row.rounds},
                    {"calls", row.calls}};
  return object.dump();
}

}  // namespace lockstep::bench
