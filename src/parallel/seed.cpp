#include <lockstep/seed.h>

#include <cstdlib>

#include <ATen/Context.h>

#include <lockstep/error.h>

#include "base/mix_bits.h"
#include "base/text.h"

namespace lockstep {

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
  return seed_everything(mix_bits(mix_bits(seed) + static_cast<uint64_t>(group.rank())));
}

}  // namespace lockstep
