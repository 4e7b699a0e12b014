#include <lockstep/collate.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

std::string describe_sample(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return text("a tensor of shape ", tensor.sizes(), ", ", tensor.scalar_type(), ", on ", tensor.device());
}

bool are_alike(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) return one.defined() == other.defined();
  return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() && one.device() == other.device();
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.requires_grad() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg();
}

// Equivalent to at::stack for contiguous CPU tensors, without one dispatch per tensor: five times as fast for small
// tensors.
at::Tensor stack_memory(const std::vector<at::Tensor>& tensors) {
  auto shape = tensors[0].sizes().vec();
  shape.insert(shape.begin(), static_cast<int64_t>(tensors.size()));
  auto stacked = at::empty(shape, tensors[0].options());
  const size_t bytes = tensors[0].nbytes();
  if (bytes == 0) return stacked;
  auto* next = static_cast<char*>(stacked.data_ptr());
  for (const auto& tensor : tensors) {
    std::memcpy(next, tensor.data_ptr(), bytes);
    next += bytes;
  }
  return stacked;
}

// Returns an undefined tensor if all are undefined: samples may have no target.
at::Tensor stack(const std::vector<at::Tensor>& tensors, const char* what) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!are_alike(tensors[i], tensors[0])) {
      throw UsageError(text("the samples cannot be stacked: ", what, " of sample ", i, " in the batch is ",
                            describe_sample(tensors[i]), ", but that of sample 0 is ", describe_sample(tensors[0]),
                            "; return tensors of one shape, dtype and device, or pass DataLoader a collate function"));
    }
  }
  if (!tensors.at(0).defined()) return {};
  return std::all_of(tensors.begin(), tensors.end(), is_plain_memory) ? stack_memory(tensors) : at::stack(tensors);
}

void check_sequences(const std::vector<at::Tensor>& sequences, const char* what) {
  const auto& first = sequences.at(0);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const auto& sequence = sequences[i];
    const bool is_sequence = sequence.defined() && first.defined() && sequence.dim() > 0 && first.dim() > 0;
    if (is_sequence && sequence.sizes().slice(1) == first.sizes().slice(1) &&
        sequence.scalar_type() == first.scalar_type() && sequence.device() == first.device())
      continue;
    throw UsageError(text("the samples cannot be padded: ", what, " of sample ", i, " in the batch is ",
                          describe_sample(sequence), ", and that of sample 0 is ", describe_sample(first),
                          "; return tensors that differ in the size of their first dimension only"));
  }
}

/// [samples, length, ...]
at::Tensor padded(const std::vector<at::Tensor>& sequences, int64_t length, double value) {
  auto shape = sequences.at(0).sizes().vec();
  shape[0] = length;
  shape.insert(shape.begin(), static_cast<int64_t>(sequences.size()));
  auto batch = at::full(shape, value, sequences[0].options());
  for (size_t i = 0; i < sequences.size(); ++i)
    batch[static_cast<int64_t>(i)].narrow(0, 0, sequences[i].size(0)).copy_(sequences[i]);
  return batch;
}

}  // namespace

void detail::refuse_other_keys(size_t sample) {
  throw UsageError(text("the samples cannot be collated: sample ", sample,
                        " in the batch has other keys than sample 0; return maps with the same keys"));
}

at::Tensor PaddedBatch::mask() const {
  return at::arange(data.size(1), lengths.options()).unsqueeze(0) < lengths.unsqueeze(1);
}

Pad::Pad(PadOptions options) : options_(options) {
  if (options.multiple_of < 1)
    throw UsageError(text("Pad: multiple_of is ", options.multiple_of, ", expected 1 or more"));
}

PaddedBatch Pad::operator()(std::vector<at::Tensor> samples) const {
  check_sequences(samples, "the data");
  PaddedBatch batch;
  std::vector<int64_t> lengths;
  for (const auto& sample : samples) lengths.push_back(sample.size(0));
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const int64_t length = (longest + options_.multiple_of - 1) / options_.multiple_of * options_.multiple_of;
  batch.data = padded(samples, length, options_.value);
  batch.lengths = at::tensor(lengths, at::kLong);
  return batch;
}

PaddedBatch Pad::operator()(std::vector<torch::data::Example<>> samples) const {
  std::vector<at::Tensor> data, targets;
  bool are_sequences = true;
  for (auto& sample : samples) {
    const auto& target = sample.target;
    are_sequences = are_sequences && target.defined() && target.dim() > 0 && sample.data.dim() > 0 &&
                    target.size(0) == sample.data.size(0);
    data.push_back(std::move(sample.data));
    targets.push_back(target);
  }
  auto batch = (*this)(std::move(data));
  if (are_sequences) check_sequences(targets, "the target");
  batch.target =
      are_sequences ? padded(targets, batch.data.size(1), options_.target_value) : stack(targets, "the target");
  return batch;
}

at::Tensor Stack::operator()(std::vector<at::Tensor> samples) const {
  return stack(samples, "the tensor");
}

torch::data::Example<> Stack::operator()(std::vector<torch::data::Example<>> samples) const {
  std::vector<at::Tensor> data, targets;
  data.reserve(samples.size());
  targets.reserve(samples.size());
  for (auto& sample : samples) {
    data.push_back(std::move(sample.data));
    targets.push_back(std::move(sample.target));
  }
  return {stack(data, "the data"), stack(targets, "the target")};
}

torch::data::TensorExample Stack::operator()(std::vector<torch::data::TensorExample> samples) const {
  std::vector<at::Tensor> data;
  data.reserve(samples.size());
  for (auto& sample : samples) data.push_back(std::move(sample.data));
  return stack(data, "the data");
}

}  // namespace lockstep
