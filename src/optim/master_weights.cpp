#include "optim/master_weights.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/TensorIterator.h>

#include "base/loop_order.h"
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

/// Copies the elements of `values` to `exact`, except where `values` equals the rounded element of `exact`: such
/// elements keep their digits.
void copy_changed_elements(const at::Tensor& exact, const at::Tensor& values) {
  const auto rounded = exact.to(values.scalar_type());
  if (values.is_cpu() && std::memcmp(values.data_ptr(), rounded.data_ptr(), rounded.nbytes()) == 0) return;
  exact.copy_(at::where(rounded == values, exact, values.to(at::kFloat)));
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

bool MasterWeights::may_be_written(const Master& master) {
  const auto& parameter = master.parameter;
  return master.version != version_of(parameter) || master.offset != parameter.storage_offset() ||
         master.storage != parameter.storage().getWeakStorageImpl();
}

void MasterWeights::update_from_parameter(Master& master) {
  copy_changed_elements(master.tensor, master.parameter.detach());
  note_equal(master);
}

const at::Tensor& MasterWeights::of(const at::Tensor& parameter) {
  auto& master = masters_[parameter.unsafeGetTensorImpl()];
  if (!master.tensor.defined()) {
    master.parameter = parameter;
    master.tensor =
        parameter.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Preserve);
    note_equal(master);
  } else if (parameter.is_cuda() && !is_capturing(parameter.device()) && may_be_written(master)) {
    update_from_parameter(master);
  }
  return master.tensor;
}

void MasterWeights::update(const at::Tensor& parameter, const at::Tensor& gradient, const Update& update) {
  constexpr int64_t kPiece = 1 << 14;  // elements
  const auto& exact = of(parameter);
  const auto values = laid_out_as(exact, parameter.detach());
  const auto slopes = laid_out_as(exact, gradient.resolve_neg());
  const auto update_piece = [&](int64_t begin, int64_t count) {
    const auto piece = [&](const at::Tensor& dense) {
      auto* data = static_cast<char*>(dense.data_ptr()) + begin * static_cast<int64_t>(dense.element_size());
      return at::from_blob(data, {count}, dense.scalar_type());
    };
    const auto exact_piece = piece(exact), value_piece = piece(values);
    copy_changed_elements(exact_piece, value_piece);
    update(begin, count, piece(slopes).to(at::kFloat).data_ptr());
    value_piece.copy_(exact_piece);
  };
  // Not at::parallel_for, which runs on LibTorch's threads only where the caller is compiled with OpenMP.
  const auto row = as_row(exact);
  auto parts = at::TensorIteratorConfig().add_output(row).check_all_same_dtype(false).resize_outputs(false).build();
  const auto update_part = [&](char** data, const int64_t*, int64_t size, int64_t rows) {
    const ParallelLoop::Part part;
    const int64_t begin = reinterpret_cast<float*>(data[0]) - exact.data_ptr<float>(), count = size * rows;
    for (int64_t done = 0; done < count; done += kPiece) update_piece(begin + done, std::min(kPiece, count - done));
  };
  const ParallelLoop loop;
  parts.for_each(update_part);
  if (values.data_ptr() != parameter.data_ptr()) parameter.detach().copy_(values);
  parameter.unsafeGetTensorImpl()->bump_version();
}

void MasterWeights::update_from_parameters() {
  for (auto& [parameter, master] : masters_)
    if (master.parameter.is_cuda() && may_be_written(master)) update_from_parameter(master);
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
