#include "optim/master_weights.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/torch_version.h"
#include "optim/layout.h"

namespace lockstep::detail {
namespace {

constexpr const char* kKey = "lockstep_master_weights";

uint64_t version_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor._version());
}

/// Whether each value of `rounded` has the bits of the rounded `exact`. Rounds pieces that stay in a cache, because a
/// whole rounded copy would go through memory.
bool is_rounded_from(const at::Tensor& exact, const at::Tensor& rounded) {
  constexpr int64_t kPiece = 1 << 14;  // elements
  if (!exact.is_non_overlapping_and_dense() || exact.strides() != rounded.strides())
    return rounded.equal(exact.to(rounded.scalar_type()));
  const auto from = as_row(exact), to = as_row(rounded);
  for (int64_t begin = 0; begin < from.numel(); begin += kPiece) {
    const auto expected = from.narrow(0, begin, std::min(kPiece, from.numel() - begin)).to(to.scalar_type());
    const auto* bytes = static_cast<const char*>(to.data_ptr()) + begin * static_cast<int64_t>(to.element_size());
    if (std::memcmp(bytes, expected.data_ptr(), expected.nbytes()) != 0) return false;
  }
  return true;
}

}  // namespace

bool MasterWeights::is_for(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16;
}

void MasterWeights::note_equal(Master& master) {
  master.version = version_of(master.parameter);
  master.storage = master.parameter.storage().getWeakStorageImpl();
  master.offset = master.parameter.storage_offset();
}

bool MasterWeights::is_written(const Master& master) {
  const auto& parameter = master.parameter;
  if (master.version != version_of(parameter) || master.offset != parameter.storage_offset() ||
      master.storage != parameter.storage().getWeakStorageImpl())
    return true;
  return parameter.is_cpu() && !is_rounded_from(master.tensor, parameter.detach());
}

// Elements that are still the rounded copy keep the copy's digits.
void MasterWeights::take_over(Master& master) {
  const auto values = master.parameter.detach();
  const auto rounded = master.tensor.to(values.scalar_type());
  master.tensor.copy_(at::where(rounded == values, master.tensor, values.to(at::kFloat)));
  note_equal(master);
}

const at::Tensor& MasterWeights::of(const at::Tensor& parameter) {
  auto& master = masters_[parameter.unsafeGetTensorImpl()];
  if (!master.tensor.defined()) {
    master.parameter = parameter;
    master.tensor =
        parameter.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Preserve);
    note_equal(master);
  } else if (!is_capturing(parameter.device()) && is_written(master)) {
    take_over(master);
  }
  return master.tensor;
}

void MasterWeights::take_over_writes() {
  for (auto& [parameter, master] : masters_)
    if (is_written(master)) take_over(master);
}

at::Tensor MasterWeights::find(const at::Tensor& parameter) const {
  const auto found = masters_.find(parameter.unsafeGetTensorImpl());
  return found == masters_.end() ? at::Tensor() : found->second.tensor;
}

void MasterWeights::set(const at::Tensor& parameter, const at::Tensor& master) {
  auto& place = masters_[parameter.unsafeGetTensorImpl()];
  place.tensor = laid_out_as(parameter.detach(), master.detach().to(parameter.device(), at::kFloat));
  if (place.tensor.is_same(master) || place.tensor.data_ptr() == master.data_ptr()) place.tensor = place.tensor.clone();
  place.parameter = parameter;
  place.storage.reset();  // the parameter may have other values: compared in the next step
}

void MasterWeights::round(const std::vector<at::Tensor>& parameters) {
  if (parameters.empty()) return;
  std::vector<at::Tensor> to, from;
  for (const auto& parameter : parameters) {
    to.push_back(parameter.detach());
    from.push_back(masters_.at(parameter.unsafeGetTensorImpl()).tensor);
  }
  copy_together(to, from);
  for (const auto& parameter : parameters) note_equal(masters_.at(parameter.unsafeGetTensorImpl()));
}

void MasterWeights::save(const torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& archive) const {
  torch::serialize::OutputArchive masters;
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      if (const auto master = find(parameter); master.defined()) masters.write(text(number), master, true);
      ++number;
    }
  archive.write(kKey, masters);
}

void MasterWeights::load(const torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive) {
  masters_.clear();
  torch::serialize::InputArchive masters;
  if (!archive.try_read(kKey, masters)) return;
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      at::Tensor master;
      if (masters.try_read(text(number++), master, true)) set(parameter, master);
    }
}

}  // namespace lockstep::detail
