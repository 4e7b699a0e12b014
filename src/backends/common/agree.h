#pragma once

#include <string>

#include <lockstep/backend.h>

#include "base/text.h"

namespace lockstep {

/// Whether all ranks can go on: each tells what keeps it from that, or nothing, and all get the same answer: the
/// trouble of the first rank that has any. Collective; `key` is used once in the life of a group.
inline std::string agree(const BackendContext& context, const std::string& key, const std::string& trouble) {
  context.store->set(text(key, '/', context.rank), trouble);
  std::string first;
  for (int rank = 0; rank < context.size; ++rank) {
    auto theirs = context.store->get(text(key, '/', rank), context.timeout);
    if (first.empty() && !theirs.empty()) first = text("rank ", rank, ": ", theirs);
  }
  return first;
}

}  // namespace lockstep
