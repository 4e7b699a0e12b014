#include "parallel/reducer.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

std::vector<GradientSpec> specs_of(const std::vector<NamedParameter>& parameters) {
  std::vector<GradientSpec> specs;
  for (const auto& [name, tensor] : parameters)
    specs.push_back({tensor.numel(), tensor.scalar_type(), tensor.device()});
  return specs;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

}  // namespace

class Reducer::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(Reducer& reducer, size_t parameter) : reducer_(reducer), parameter_(parameter) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    reducer_.on_gradient(parameter_);
    return outputs;
  }

 private:
  Reducer& reducer_;
  const size_t parameter_;
};

Reducer::Reducer(std::vector<NamedParameter> parameters, ProcessGroup group, const ReducerOptions& options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(options),
      plan_(plan_buckets(specs_of(parameters_), options.limits)),
      places_(parameters_.size()),
      got_(parameters_.size()),
      used_(parameters_.size()) {
  // The last bucket also carries, for each parameter, whether it is used and whether it is unused: averaged over the
  // ranks, a mark above zero means "on some rank", in any floating-point type.
  int64_t marks = 2 * static_cast<int64_t>(parameters_.size());
  for (size_t b = 0; b < plan_.buckets.size(); ++b) {
    std::vector<at::Tensor> members;
    for (size_t parameter : plan_.buckets[b]) {
      places_[parameter] = {b, members.size()};
      members.push_back(parameters_[parameter].tensor);
    }
    buckets_.emplace_back(group_, members, b + 1 == plan_.buckets.size() ? marks : 0);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(parameters_[i].tensor));
    hook_keys_.push_back(accumulators_[i]->add_post_hook(std::make_unique<Hook>(*this, i)));
  }
}

Reducer::~Reducer() {
  for (size_t i = 0; i < accumulators_.size(); ++i) accumulators_[i]->del_post_hook(hook_keys_[i]);
}

void Reducer::set_enabled(bool enabled) {
  std::lock_guard lock(mutex_);
  enabled_ = enabled;
}

bool Reducer::is_enabled() const {
  std::lock_guard lock(mutex_);
  return enabled_;
}

void Reducer::check_finished() const {
  std::lock_guard lock(mutex_);
  if (in_backward_)
    throw UsageError(text("rank ", group_.rank(),
                          ": the last backward broke off, so this rank has left the others in the middle of a "
                          "reduction; end the job and resume from a checkpoint"));
}

const at::Tensor& Reducer::view_of(size_t parameter) const {
  return buckets_[places_[parameter].bucket].gradient(places_[parameter].slot);
}

void Reducer::on_gradient(size_t parameter) {
  std::lock_guard lock(mutex_);
  used_[parameter] = true;
  if (!enabled_) return;
  if (!in_backward_) begin();
  if (got_[parameter])
    throw UsageError(
        text("rank ", group_.rank(), ": parameter '", parameters_[parameter].name,
             "' got a second gradient in one backward, after its first was already on its way to the other "
             "ranks; run such backward passes under no_sync() but for the last"));
  got_[parameter] = true;
  put_in_bucket(parameter);
  start_full_buckets();
}

void Reducer::begin() {
  in_backward_ = true;
  started_ = 0;
  std::fill(got_.begin(), got_.end(), false);
  for (auto& bucket : buckets_) bucket.reset();
  torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(); });
}

// Copies the gradient, unless autograd has accumulated into the bucket's memory already.
void Reducer::put_in_bucket(size_t parameter) {
  c10::NoGradGuard no_grad;
  const auto& gradient = parameters_[parameter].tensor.grad();
  const auto& view = view_of(parameter);
  if (!gradient.defined()) {
    view.zero_();
  } else if (gradient.layout() != c10::kStrided) {
    throw UsageError(text("rank ", group_.rank(), ": the gradient of parameter '", parameters_[parameter].name, "' is ",
                          gradient.layout(),
                          "; only dense gradients can be averaged (for Embedding, set sparse to false)"));
  } else if (!same_memory(gradient, view)) {
    view.copy_(gradient);
  }
  buckets_[places_[parameter].bucket].fill();
}

// In the order of the plan, which is the same on all ranks, whatever order the gradients come in.
void Reducer::start_full_buckets() {
  for (; started_ < buckets_.size() && buckets_[started_].is_full(); ++started_) {
    if (started_ + 1 == buckets_.size()) mark_use();
    buckets_[started_].start_average();
  }
}

void Reducer::mark_use() {
  auto used = at::empty({static_cast<int64_t>(used_.size())}, at::kFloat);
  for (size_t i = 0; i < used_.size(); ++i) used.data_ptr<float>()[i] = used_[i] ? 1.0f : 0.0f;
  buckets_.back().extra().copy_(at::cat({used, 1 - used}));
}

void Reducer::finish() {
  std::lock_guard lock(mutex_);
  c10::NoGradGuard no_grad;
  // What got no gradient goes in as it stands, so that the buckets can leave and no rank waits for this one. Where its
  // old gradient lies in the bucket, the reduction writes over it: keep it.
  std::vector<at::Tensor> kept(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (got_[i]) continue;
    const auto& gradient = parameters_[i].tensor.grad();
    if (gradient.defined()) kept[i] = gradient.clone();
    put_in_bucket(i);
  }
  start_full_buckets();
  for (auto& bucket : buckets_) bucket.finish_average();
  in_backward_ = false;

  auto marks = buckets_.back().extra().to(at::kCPU, at::kFloat).view({2, -1});
  auto used = std::exchange(used_, std::vector<char>(used_.size()));
  if (!options_.allow_unused) throw_unused(used, marks[1]);
  const float* used_anywhere = marks[0].data_ptr<float>();
  for (size_t i = 0; i < parameters_.size(); ++i) restore_or_adopt(i, used_anywhere[i] > 0, kept[i]);
}

void Reducer::restore_or_adopt(size_t parameter, bool used_somewhere, const at::Tensor& kept) {
  auto& gradient = parameters_[parameter].tensor.mutable_grad();
  const auto& view = view_of(parameter);
  if (used_somewhere) {
    if (!gradient.defined() || !same_memory(gradient, view)) gradient = view;
  } else if (kept.defined()) {
    gradient.copy_(kept);
  }
}

void Reducer::throw_unused(const std::vector<char>& used, const at::Tensor& unused_anywhere) const {
  const float* marks = unused_anywhere.data_ptr<float>();
  std::vector<std::string> here;
  std::vector<std::string> elsewhere;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (marks[i] > 0) (used[i] ? elsewhere : here).push_back(text('\'', parameters_[i].name, '\''));
  if (here.empty() && elsewhere.empty()) return;
  auto sentence = [](const std::vector<std::string>& names, const char* where) {
    return names.empty() ? std::string() : text("no gradient ", where, " for ", enumerate(names), "; ");
  };
  throw UsageError(text("rank ", group_.rank(), ": backward gave ", sentence(here, "on this rank"),
                        sentence(elsewhere, "on another rank"),
                        "use every parameter in the loss, or wrap with {.find_unused_parameters = true}"));
}

}  // namespace lockstep
