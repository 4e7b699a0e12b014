#include <lockstep/seed.h>

#include <cstdlib>

#include <ATen/Context.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

uint64_t detail::mix_bits(uint64_t number) {
  number += 0x9e3779b97f4a7c15;
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
  number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
  return number ^ (number >> 31);
}

uint64_t seed_everything(uint64_t seed) {
  at::manual_seed(seed);
  std::srand(static_cast<unsigned>(seed));
  return seed;
}

uint64_t seed_everything(uint64_t seed, const ProcessGroup& group, const SeedOptions& options) {
  if (!group.contains_me())
    throw UsageError(text("seed_everything: this process is not in group '", group.name(),
                          "', so it has no rank there; pass a group that contains it"));
  if (options.same_on_all_ranks) return seed_everything(seed);
  return seed_everything(detail::mix_bits(detail::mix_bits(seed) + static_cast<uint64_t>(group.rank())));
}

}  // namespace lockstep
