#pragma once

#include <string>

#include <lockstep/backend.h>

#include "base/error.h"
#include "base/text.h"

namespace lockstep {

/// Agrees on whether all ranks succeeded. Each rank passes its error, or an empty string. Returns the error of the
/// lowest rank that has one, or an empty string: the same result on all ranks. Collective. Each `key` may be used once
/// per group.
inline std::string agree(const BackendContext& context, const std::string& key, const std::string& error) {
  const auto errors = context.store->all_gather(key, context.rank, context.size, error, context.timeout);
  for (int rank = 0; rank < context.size; ++rank)
    if (!errors[rank].empty()) return text("rank ", rank, ": ", without_rank(errors[rank], rank));
  return "";
}

}  // namespace lockstep
