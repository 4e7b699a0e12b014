#include "checkpoint/element_budget.h"

#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/error.h>

#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

constexpr uint64_t kRepetitions = 64, kFreeBytes = 16 << 20;

}  // namespace

View view_of(const at::Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.scalar_type(), tensor.storage_offset(), tensor.sizes().vec(),
          tensor.strides().vec()};
}

ElementBudget::ElementBudget(std::string files, const std::vector<NamedTensor>& tensors, std::string remedy)
    : files_(std::move(files)), remedy_(std::move(remedy)) {
  std::set<const void*> storages;
  for (const auto& [name, tensor] : tensors)
    if (storages.insert(tensor.storage().unsafeGetStorageImpl()).second) stored_ += tensor.storage().nbytes();
  limit_ = kRepetitions * stored_ + kFreeBytes;
}

void ElementBudget::spend(const NamedTensor& named, uint64_t bytes) {
  if (bytes > limit_ - spent_)
    throw CheckpointError(fmt::format(
        "{}: tensor '{}' of sizes {} has {}, but only {} are stored: the tensors repeat the elements of their storages "
        "more than {} times; {}",
        files_, shorten(named.name, 200), shape_text(named.tensor), human_bytes(bytes), human_bytes(stored_),
        kRepetitions, remedy_));
  spent_ += bytes;
}

}  // namespace lockstep::checkpoint
