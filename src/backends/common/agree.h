#pragma once

#include <string>

#include <lockstep/backend.h>

#include "base/text.h"

namespace lockstep {

/// Whether all ranks can go on: each tells what keeps it from that, or nothing, and all get the same answer: the
/// trouble of the first rank that has any. Collective; `key` is used once in the life of a group.
inline std::string agree(const BackendContext& context, const std::string& key, const std::string& trouble) {
  const auto troubles = context.store->all_gather(key, context.rank, context.size, trouble, context.timeout);
  for (int rank = 0; rank < context.size; ++rank)
    if (!troubles[rank].empty()) return text("rank ", rank, ": ", troubles[rank]);
  return "";
}

}  // namespace lockstep
