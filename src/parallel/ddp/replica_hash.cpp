#include "parallel/ddp/replica_hash.h"

#include <cstdint>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ull;

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kPrime;
  return hash ^ (hash >> 29);
}

/// Of the bits, in four chains so that the processor need not wait for one.
uint64_t hash_bits(const at::Tensor& tensor) {
  const auto dense = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const char*>(dense.data_ptr());
  const size_t size = dense.nbytes();
  uint64_t chains[4] = {1, 2, 3, 4};
  size_t at = 0;
  for (; at + sizeof chains <= size; at += sizeof chains) {
    uint64_t words[4];
    std::memcpy(words, bytes + at, sizeof words);
    for (int i = 0; i < 4; ++i) chains[i] = mix(chains[i], words[i]);
  }
  uint64_t rest[4] = {};
  std::memcpy(rest, bytes + at, size - at);
  uint64_t hash = size;
  for (int i = 0; i < 4; ++i) hash = mix(mix(hash, chains[i]), rest[i]);
  return hash;
}

}  // namespace

void check_equal(const std::vector<NamedParameter>& tensors, const ProcessGroup& group) {
  const auto count = static_cast<int64_t>(tensors.size());
  auto mine = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) mine.data_ptr<int64_t>()[i] = static_cast<int64_t>(hash_bits(tensors[i].tensor));
  auto all = at::empty({group.size() * count}, at::TensorOptions().dtype(at::kLong).device(group.device()));
  group.all_gather(all, mine.to(group.device()));
  all = all.cpu();
  const auto* hash = all.data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int> others;
    for (int rank = 1; rank < group.size(); ++rank)
      if (hash[rank * count + i] != hash[i]) others.push_back(rank);
    if (others.empty()) continue;
    throw MismatchError(text("rank ", group.rank(), ": the replicas have come apart: parameter '", tensors[i].name,
                             "' is another on ", others.size() == 1 ? "rank " : "ranks ", enumerate(others),
                             " than on rank 0; change parameters on all ranks alike, or call "
                             "sync_parameters_and_buffers() after changing them on one"));
  }
}

}  // namespace lockstep
