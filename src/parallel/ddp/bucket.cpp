#include "parallel/ddp/bucket.h"

#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "base/align.h"
#include "comm/capture.h"
#include "comm/torch_version.h"
#include "parallel/ddp/averaging_hook.h"

namespace lockstep {
namespace {

// Each gradient begins on a cache line, so vector loops need no unaligned prologue.
constexpr int64_t kGradientAlignBytes = 64;

constexpr size_t kLargeBytes = 1 << 20;

const CallOptions kInBackward{.site = {"backward of DistributedDataParallel", 0}};

int64_t real_elements(const at::Tensor& tensor) {
  return tensor.numel() * (tensor.is_complex() ? 2 : 1);
}

detail::BucketUpdate::Layout layout_of(const std::vector<NamedParameter>& parameters, at::ScalarType dtype) {
  const int64_t alignment = kGradientAlignBytes / static_cast<int64_t>(c10::elementSize(dtype));
  detail::BucketUpdate::Layout layout;
  for (const auto& parameter : parameters) {
    layout.offsets.push_back(layout.elements);
    layout.elements += align_up(real_elements(parameter.tensor), alignment);
  }
  return layout;
}

}  // namespace

Bucket::Bucket(const ProcessGroup& group, size_t index, at::ScalarType dtype,
               const std::vector<NamedParameter>& parameters, int64_t extra, int64_t plan, const StepRecorder& recorder,
               const std::optional<Prescribed>& prescribed)
    : group_(group),
      layout_(prescribed ? prescribed->layout : layout_of(parameters, dtype)),
      is_memory_shared_(prescribed.has_value()),
      missing_(parameters.size()),
      recorder_(&recorder) {
  c10::NoGradGuard no_grad;
  contents_.index = index;
  contents_.is_last = extra > 0;
  contents_.plan = plan;
  for (const auto& [name, tensor] : parameters) {
    contents_.names.push_back(name);
    contents_.parameters.push_back(tensor);
  }
  if (prescribed) {
    const auto bytes = layout_.elements * static_cast<int64_t>(c10::elementSize(dtype));
    use(prescribed->memory.narrow(0, 0, bytes).view(dtype),
        at::zeros({extra}, prescribed->memory.options().dtype(dtype)));
  } else {
    const auto memory = group.allocate({layout_.elements + extra}, dtype).zero_();  // the padding is reduced as well
    use(memory, memory.narrow(0, layout_.elements, extra));
  }
  if (memory_.is_cuda())
    padding_ = at::zeros({kGradientAlignBytes / static_cast<int64_t>(c10::elementSize(dtype))}, memory_.options());
  times_ = {static_cast<int64_t>(contents_.buffer.nbytes()), contents_.gradients.size()};
  note_users();
}

void Bucket::use(const at::Tensor& memory, const at::Tensor& extra) {
  memory_ = memory;
  extra_ = extra;
  contents_.buffer = memory_.narrow(0, 0, layout_.elements);
  contents_.gradients.clear();
  for (size_t slot = 0; slot < contents_.parameters.size(); ++slot) {
    const auto& parameter = contents_.parameters[slot];
    auto part = memory_.narrow(0, layout_.offsets[slot], real_elements(parameter));
    if (parameter.is_complex()) part = at::view_as_complex(part.view({-1, 2}));
    bool dense = parameter.is_non_overlapping_and_dense();
    contents_.gradients.push_back(
        (dense ? part.as_strided(parameter.sizes(), parameter.strides()) : part.view(parameter.sizes())).detach());
  }
  if (!contents_.is_last) return;
  contents_with_extra_ = contents_;
  contents_with_extra_.buffer = memory_;
  contents_with_extra_.gradients.push_back(extra_);
}

void Bucket::note_users() {
  memory_users_ = memory_.storage().use_count();
  gradient_users_.clear();
  for (const auto& gradient : contents_.gradients) gradient_users_.push_back(gradient.use_count());
}

bool Bucket::is_used_elsewhere(size_t slot) const {
  return memory_.storage().use_count() > memory_users_ || contents_.gradients[slot].use_count() > gradient_users_[slot];
}

void Bucket::move() {
  c10::NoGradGuard no_grad;
  const auto memory = group_.allocate(memory_.sizes(), memory_.scalar_type()).copy_(memory_);
  use(memory, memory.narrow(0, layout_.elements, extra_.numel()));
  note_users();
}

void Bucket::reset() {
  missing_ = contents_.gradients.size();
  is_open_ = false;
  places_.clear();
  values_.clear();
  average_.reset();
  finish_hook_ = nullptr;
}

void Bucket::put(size_t slot, const at::Tensor& gradient) {
  auto place = contents_.gradients[slot];
  if (is_memory_shared_ && !is_open_) {
    hold_back(place, gradient);
  } else if (!gradient.defined()) {
    place.zero_();
  } else if (!same_memory(gradient, place)) {
    if (!place.is_cuda())
      write(place, gradient);
    else if (exceeds_half_of_bucket(place))
      place.copy_(gradient, /*non_blocking=*/true);
    else
      hold_back(place, gradient);
  }
  if (--missing_ == 0) times_.full = recorder_->now();
}

/// Such a gradient gets its own copy, so that its memory can be freed at once.
bool Bucket::exceeds_half_of_bucket(const at::Tensor& place) const {
  return place.nbytes() >= kLargeBytes && 2 * place.nbytes() >= memory_.nbytes();
}

void Bucket::open() {
  is_open_ = true;
  flush_pending_copies();
}

void Bucket::hold_back(const at::Tensor& place, const at::Tensor& gradient) {
  places_.push_back(place);
  values_.push_back(gradient);
}

void Bucket::put_extra(const at::Tensor& values) {
  if (places_.empty())
    extra_.copy_(values);
  else
    hold_back(extra_, values);
}

void Bucket::flush_pending_copies() {
  if (places_.empty()) return;
  std::vector<at::Tensor> places, values;
  for (size_t i = 0; i < places_.size(); ++i) {
    if (!values_[i].defined()) {
      places_[i].zero_();
    } else if (places_[i].is_cuda()) {
      places.push_back(places_[i]);
      values.push_back(values_[i]);
    } else {
      write(places_[i], values_[i]);
    }
  }
  if (!places.empty() && detail::is_capturing(memory_.device()))
    concatenate(places, values);
  else if (!places.empty())
    detail::copy_together(places, values);
  places_.clear();
  values_.clear();
}

/// Copies like copy_together, but writes neighbouring gradients as one concatenation, which keeps the whole GPU busy.
/// LibTorch's copy of a list assigns 65536 elements to each thread block: 8 us for 0.12 M elements on an H200, instead
/// of 2 us. The concatenation takes longer on the host, so it is for captured steps.
void Bucket::concatenate(const std::vector<at::Tensor>& places, const std::vector<at::Tensor>& values) {
  std::map<int64_t, at::Tensor> rows;  // by their first element in memory_
  std::vector<at::Tensor> other_places, other_values;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].numel() == 0) continue;
    const bool fits = places[i].is_alias_of(memory_) && values[i].scalar_type() == memory_.scalar_type() &&
                      same_layout(places[i], values[i]) && values[i].is_non_overlapping_and_dense();
    if (fits) {
      rows.emplace(places[i].storage_offset() - memory_.storage_offset(),
                   values[i].as_strided({values[i].numel()}, {1}));
    } else {
      other_places.push_back(places[i]);
      other_values.push_back(values[i]);
    }
  }
  for (auto next = rows.begin(); next != rows.end();) {
    const int64_t begin = next->first;
    int64_t end = begin;
    std::vector<at::Tensor> run;
    for (; next != rows.end() && next->first - end < padding_.numel(); ++next) {
      if (next->first > end) run.push_back(padding_.narrow(0, 0, next->first - end));
      run.push_back(next->second);
      end = next->first + next->second.numel();
    }
    auto to = memory_.narrow(0, begin, end - begin);
    at::cat_out(to, run);
  }
  if (!other_places.empty()) detail::copy_together(other_places, other_values);
}

void Bucket::start(const CommHook& hook, bool averages_extra) {
  flush_pending_copies();
  times_.started = recorder_->now();
  if (hook) {
    const bool takes_extra = contents_.is_last && hook.target<AveragingHook>();
    finish_hook_ = hook(takes_extra ? contents_with_extra_ : contents_, group_);
    if (contents_.is_last && averages_extra && !takes_extra)
      average_ = group_.all_reduce_async(extra_, ReduceOp::kAvg, kInBackward);
  } else {
    average_ = group_.all_reduce_async(memory_, ReduceOp::kAvg, kInBackward);
    if (memory_.is_cuda()) times_.reduced = recorder_->end_of(*average_);
  }
}

void Bucket::finish() {
  auto finish_hook = std::exchange(finish_hook_, nullptr);
  auto average = std::exchange(average_, std::nullopt);
  if (finish_hook) finish_hook();
  if (average) average->wait();
  if (finish_hook)
    times_.reduced = recorder_->now();
  else if (!memory_.is_cuda())
    times_.reduced = recorder_->end_of(*average);
}

void Bucket::reduce() {
  flush_pending_copies();
  times_.started = recorder_->now();
  group_.all_reduce(memory_, ReduceOp::kAvg, kInBackward);
  times_.reduced = recorder_->now();
}

}  // namespace lockstep
