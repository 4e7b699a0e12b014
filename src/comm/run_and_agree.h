#pragma once

#include <exception>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <lockstep/process_group.h>

#include "base/error.h"
#include "base/text.h"

// Errors of one rank that all ranks must throw, because the other ranks would wait for that rank.

namespace lockstep::detail {

/// For a second group of the same ranks.
inline std::vector<int> all_ranks(const ProcessGroup& group) {
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Whether the group is broken after this error, so that ranks cannot agree on anything.
inline bool breaks_group(const std::exception_ptr& error) {
  const auto kind = kind_of(error);
  return kind == ErrorKind::kPeer || kind == ErrorKind::kTimeout || kind == ErrorKind::kMismatch;
}

/// Throws on all ranks if one of them has an error: that rank throws its own error, the other ranks an error of the
/// same kind. Collective.
inline void agree(const ProcessGroup& group, const std::exception_ptr& error) {
  if (error && breaks_group(error)) std::rethrow_exception(error);
  std::vector<c10::IValue> all;
  try {
    all = group.all_gather_object(c10::ivalue::Tuple::create(
        {c10::IValue(static_cast<int64_t>(error ? kind_of(error) : ErrorKind::kError)),
         c10::IValue(error ? message_of(error) : std::string()), c10::IValue(error != nullptr)}));
  } catch (const Error&) {
    if (!error) throw;  // otherwise this rank throws its own error below
  }
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto& parts = all[rank].toTupleRef().elements();
    if (parts[2].toBool())
      throw_error(static_cast<ErrorKind>(parts[0].toInt()),
                  text("on rank ", rank, ": ", without_rank(parts[1].toStringRef(), static_cast<int>(rank))));
  }
}

template <class Body>
void run_and_agree(const ProcessGroup& group, const Body& body) {
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  agree(group, error);
}

}  // namespace lockstep::detail
