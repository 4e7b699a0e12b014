#include <lockstep/sync_batch_norm.h>

#include <ostream>
#include <set>
#include <type_traits>

#include <ATen/ATen.h>
#include <ATen/ops/batch_norm_native.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <lockstep/error.h>
#include <lockstep/model_adapters.h>

#include "base/error.h"
#include "base/text.h"
#include "comm/group/group.h"
#include "parallel/batch_norm/normalization.h"
#include "parallel/batch_norm/sync_batch_norm.h"
#include "parallel/ddp/accumulator_hooks.h"

// Overview.
//
// SyncedNormalization is the autograd function: its forward gathers each rank's mean, variance and number of values per
// channel and normalizes with the combined moments; its backward all-reduces the sums that the input gradient needs
// (see normalization.h). The gradients of weight and bias stay local, since DistributedDataParallel averages them.
// Calls during backward use the side group, if DistributedDataParallel has created one (Ranks::group_now).
//
// Two kinds of layers use it. SyncBatchNormImpl calls it directly. convert_sync_batchnorm() leaves LibTorch's
// BatchNorm layers in place and marks them: it adds a Conversion, a hook that does nothing, to the layer's running
// mean, or to its weight if there are no running statistics. The first conversion also replaces aten::batch_norm for
// the AutogradCPU and AutogradCUDA dispatch keys, for the whole process. The replacement searches the hooks of the
// tensors it receives for a Conversion. If it finds one, the layer is in training and the group has several ranks, it
// normalizes over the ranks; otherwise it calls LibTorch's implementation.

namespace lockstep {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using OptionalTensor = torch::optional<Tensor>;

Tensor value_of(const OptionalTensor& tensor) {
  return tensor ? *tensor : Tensor();
}

/// Autograd functions do not accept undefined tensors as arguments.
OptionalTensor if_defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

/// The ranks over which a layer normalizes.
struct Ranks {
  ProcessGroup group;
  std::string layer;  // for errors: "SyncBatchNorm 'first.norm'"

  /// Returns the group for a call that is made now. During backward the group's queue has gradient buckets, for which
  /// backward must not wait; the side group has no other calls. Forward stays on the group itself: if only some ranks
  /// normalize (train() and eval() mixed, a layer that is not converted on all ranks), they get a MismatchError at
  /// their next call, instead of waiting for each other in two groups.
  ProcessGroup group_now() const {
    if (!current_backward_task().id) return group;
    auto side = detail::group_of(group)->side_group();
    return side ? ProcessGroup(std::move(side)) : group;
  }

  /// Calls a collective function and prefixes its errors with the layer's name.
  template <class Function>
  auto together(Function&& function) const {
    try {
      return function(group_now());
    } catch (const Error&) {
      rethrow_with_prefix(std::current_exception(), text(layer, ": "));
    }
  }
};

/// LibTorch's kernels do not check this.
void check_channels(const Tensor& input, const NormalizingLayer& layer, const Ranks& ranks) {
  for (const auto& tensor : {layer.weight, layer.bias, layer.running_mean, layer.running_var})
    if (tensor.defined() && (input.dim() < 2 || input.size(1) != tensor.numel()))
      throw UsageError(ranks.group.rank(), text(ranks.layer, ": expected an input of shape [N, ", tensor.numel(),
                                                ", ...], got ", input.sizes()));
}

class SyncedNormalization : public torch::autograd::Function<SyncedNormalization> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias, const NormalizingLayer& layer, const Ranks& ranks) {
    auto [output, moments] =
        ranks.together([&](const ProcessGroup& group) { return normalize_over_ranks(input, layer, group); });
    context->save_for_backward({input, value_of(weight)});
    context->saved_data["kept"] = torch::IValue::make_capsule(
        c10::make_intrusive<Kept>(ranks, moments, layer.eps, input.requires_grad(), bias.has_value()));
    return output;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto capsule = context->saved_data["kept"].toCapsule();
    const auto& kept = static_cast<const Kept&>(*capsule);
    if (c10::GradMode::is_enabled())
      throw UsageError(kept.ranks.group.rank(),
                       text(kept.ranks.layer,
                            ": backward was called with create_graph, but second derivatives over several ranks are ",
                            "not supported; call eval() on the layer to compute them"));
    const auto saved = context->get_saved_variables();
    const auto& input = saved[0];
    const auto& weight = saved[1];
    auto result = kept.ranks.together([&](const ProcessGroup& group) {
      return gradients_over_ranks(gradients[0], input, weight, kept.moments, kept.eps, kept.wants_input, group);
    });
    return {result.input, weight.defined() ? result.weight : Tensor(), kept.has_bias ? result.bias : Tensor(), {}, {}};
  }

 private:
  struct Kept : torch::CustomClassHolder {
    Kept(const Ranks& ranks_, BatchMoments moments_, double eps_, bool wants_input_, bool has_bias_)
        : ranks(ranks_), moments(std::move(moments_)), eps(eps_), wants_input(wants_input_), has_bias(has_bias_) {}

    const Ranks ranks;
    const BatchMoments moments;
    const double eps;
    const bool wants_input;
    const bool has_bias;
  };
};

Tensor normalize(const Tensor& input, const NormalizingLayer& layer, const Ranks& ranks) {
  check_channels(input, layer, ranks);
  return SyncedNormalization::apply(input, if_defined(layer.weight), if_defined(layer.bias), layer, ranks);
}

// --- conversion

bool has_hooks(const Tensor& tensor) {
  return torch::autograd::impl::get_autograd_meta(tensor) && !torch::autograd::impl::hooks(tensor).empty();
}

/// Marks a converted layer. A hook on the layer's running mean, or on its weight; destroyed with that tensor. As a hook
/// it does nothing.
class Conversion final : public torch::autograd::FunctionPreHook {
 public:
  Conversion(torch::nn::Module& layer, Ranks ranks) : layer_(layer.weak_from_this()), ranks_(std::move(ranks)) {}

  static Conversion* find(const Tensor& tensor) {
    if (!tensor.defined() || !has_hooks(tensor)) return nullptr;
    for (const auto& hook : torch::autograd::impl::hooks(tensor))
      if (auto* conversion = dynamic_cast<Conversion*>(hook.get())) return conversion;
    return nullptr;
  }

  variable_list operator()(const variable_list& gradients) override { return gradients; }

  /// Needed because a layer without running statistics uses the batch's statistics in evaluation as well. In evaluation
  /// each rank uses its own batch.
  bool is_training() const {
    const auto layer = layer_.lock();
    return !layer || layer->is_training();
  }
  const Ranks& ranks() const { return ranks_; }
  void change(Ranks ranks) { ranks_ = std::move(ranks); }

 private:
  const std::weak_ptr<torch::nn::Module> layer_;
  Ranks ranks_;
};

/// Replaces aten::batch_norm. Normalizes converted layers over the ranks in training; otherwise calls LibTorch's
/// implementation.
Tensor batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                  const OptionalTensor& running_mean, const OptionalTensor& running_var, bool uses_batch,
                  double momentum, double eps, bool cudnn_enabled) {
  if (uses_batch) {
    const auto mean = value_of(running_mean);
    const auto* conversion = Conversion::find(mean.defined() ? mean : value_of(weight));
    if (conversion && conversion->is_training() && conversion->ranks().group.size() > 1)
      return normalize(input, {value_of(weight), value_of(bias), mean, value_of(running_var), momentum, eps},
                       conversion->ranks());
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, uses_batch, momentum, eps,
                                cudnn_enabled);
}

/// LibTorch 2 gives write access to a tensor's hooks, and its add_hook accepts only the first one.
template <class Hooks>
void append(Hooks& hooks, const Tensor& tensor, std::unique_ptr<Conversion> conversion) {
  if constexpr (std::is_const_v<Hooks>)
    torch::autograd::impl::add_hook(tensor, std::move(conversion));
  else
    hooks.push_back(std::move(conversion));
}

/// The first call of register_hook on a tensor removes the hooks that were added before. A list of registered hooks,
/// still empty, prevents that.
void add_mark(const Tensor& tensor, std::unique_ptr<Conversion> conversion) {
  const auto* meta = torch::autograd::impl::materialize_autograd_meta(tensor);
  if (!meta->cpp_hooks_list_) torch::autograd::impl::create_cpp_hook(tensor);
  append(torch::autograd::impl::hooks(tensor), tensor, std::move(conversion));
}

/// Installs the replacement at the first call, for the lifetime of the process.
void intercept_batch_norm() {
  static const auto intercept = [](c10::DispatchKey key) {
    torch::Library library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library.impl("batch_norm", TORCH_FN(batch_norm));
    return library;
  };
  static const auto on_cpu = intercept(c10::DispatchKey::AutogradCPU);
  static const auto on_gpu = intercept(c10::DispatchKey::AutogradCUDA);
}

/// Returns the tensor that carries the layer's mark. Returns nothing unless the module is a batch normalization. The
/// tensor is undefined if the layer has neither running statistics nor a weight.
OptionalTensor mark_of(torch::nn::Module& module) {
  const auto of = [](auto* layer) { return layer->running_mean.defined() ? layer->running_mean : layer->weight; };
  if (auto* layer = module.as<torch::nn::BatchNorm1dImpl>()) return of(layer);
  if (auto* layer = module.as<torch::nn::BatchNorm2dImpl>()) return of(layer);
  if (auto* layer = module.as<torch::nn::BatchNorm3dImpl>()) return of(layer);
  return {};
}

struct Layer {
  std::string name;
  torch::nn::Module* module;
  Tensor mark;
};

/// Returns each batch normalization once, under its first name.
std::vector<Layer> batch_norms_of(torch::nn::Module& module) {
  std::vector<Layer> result;
  std::set<torch::nn::Module*> seen;
  module.apply([&](const std::string& name, torch::nn::Module& layer) {
    const auto mark = mark_of(layer);
    if (mark && seen.insert(&layer).second) result.push_back({name, &layer, *mark});
  });
  return result;
}

void check_member(const ProcessGroup& group, const char* call) {
  if (!group.contains_me())
    throw UsageError(text(call, ": this rank is not in group '", group.name(), "'; pass a group that contains it"));
}

}  // namespace

int64_t convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group) {
  check_member(group, "convert_sync_batchnorm");
  module.apply([&](const std::string& name, torch::nn::Module& model) {
    const auto* adopted = model.as<detail::AdoptedTensors>();
    if (adopted && adopted->normalizes_batches())
      throw UsageError(group.rank(),
                       text("convert_sync_batchnorm: the BatchNorm layers of ", model.name(),
                            name.empty() ? "" : text(" '", name, "'"),
                            " cannot be converted, because they are not modules of LibTorch; use GroupNorm or ",
                            "LayerNorm in the model, or train it without conversion"));
  });
  const auto layers = batch_norms_of(module);
  for (const auto& layer : layers) {
    const auto refuse = [&](const char* why) {
      throw UsageError(group.rank(), text("convert_sync_batchnorm: layer '", layer.name, "' ", why));
    };
    if (!layer.mark.defined())
      refuse(
          "has neither running statistics nor a weight, so its calls cannot be recognized; use "
          "lockstep::SyncBatchNorm instead, or set affine or track_running_stats");
  }
  intercept_batch_norm();
  for (const auto& [name, layer, mark] : layers) {
    const Ranks ranks{group, name.empty() ? "SyncBatchNorm" : text("SyncBatchNorm '", name, "'")};
    if (auto* conversion = Conversion::find(mark))
      conversion->change(ranks);
    else
      add_mark(mark, std::make_unique<Conversion>(*layer, ranks));
  }
  return static_cast<int64_t>(layers.size());
}

std::optional<std::string> synced_batch_norm_in(torch::nn::Module& module) {
  std::optional<std::string> found;
  module.apply([&](const std::string& name, torch::nn::Module& layer) {
    const auto mark = mark_of(layer);
    if (layer.as<SyncBatchNormImpl>() || (mark && Conversion::find(*mark))) found = name;
  });
  return found;
}

int64_t synced_batch_norms_over(torch::nn::Module& module, const ProcessGroup& group) {
  int64_t count = 0;
  const auto is_same = [&](const ProcessGroup& other) { return detail::group_of(other) == detail::group_of(group); };
  module.apply([&](torch::nn::Module& layer) {
    if (const auto* synced = layer.as<SyncBatchNormImpl>()) count += is_same(synced->group());
    const auto mark = mark_of(layer);
    const auto* conversion = mark ? Conversion::find(*mark) : nullptr;
    if (conversion) count += is_same(conversion->ranks().group);
  });
  return count;
}

// --- the module

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, ProcessGroup group)
    : NormImplBase(options), group_(std::move(group)) {
  check_member(group_, "SyncBatchNorm");
}

SyncBatchNormImpl::SyncBatchNormImpl(int64_t num_features, ProcessGroup group)
    : SyncBatchNormImpl(torch::nn::BatchNormOptions(num_features), std::move(group)) {}

void SyncBatchNormImpl::_check_input_dim(const Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options.num_features())
    throw UsageError(group_.rank(), text("SyncBatchNorm: expected an input of shape [N, ", options.num_features(),
                                         ", ...], got ", input.sizes()));
}

Tensor SyncBatchNormImpl::forward(const Tensor& input) {
  _check_input_dim(input);
  double momentum = options.momentum().value_or(0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) momentum = 1 / num_batches_tracked.item<double>();
  }
  const Ranks ranks{group_, text("SyncBatchNorm of ", options.num_features(), " channels")};
  if (is_training() && group_.size() > 1)
    return normalize(input, {weight, bias, running_mean, running_var, momentum, options.eps()}, ranks);
  if (is_training())
    ranks.together([&](const ProcessGroup& group) {
      check_total(static_cast<double>(input.numel() / options.num_features()), group);
    });
  return at::batch_norm(input, weight, bias, running_mean, running_var, is_training() || !running_mean.defined(),
                        momentum, options.eps(), at::globalContext().userEnabledCuDNN());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum())
    stream << *options.momentum();
  else
    stream << "none";
  stream << std::boolalpha << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ", ranks=" << group_.size() << ')';
}

}  // namespace lockstep
