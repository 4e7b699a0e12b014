#include "parallel/ddp/model_check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/dense.h"
#include "comm/strings.h"
#include "parallel/batch_norm/sync_batch_norm.h"

namespace lockstep {
namespace {

constexpr uint64_t kPrime = 0x9E3779B97F4A7C15ull;

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * kPrime;
  return hash ^ (hash >> 29);
}

/// Hashes the tensor's bits in four independent chains, to hide the latency of each.
uint64_t hash_bits(const at::Tensor& tensor) {
  const auto dense = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg();
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
  auto own_hashes = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i)
    own_hashes.data_ptr<int64_t>()[i] = static_cast<int64_t>(hash_bits(tensors[i].tensor));
  auto all = at::empty({group.size() * count}, at::TensorOptions().dtype(at::kLong).device(group.device()));
  group.all_gather(all, own_hashes.to(group.device()));
  all = all.cpu();
  const auto* hash = all.data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int> others;
    for (int rank = 1; rank < group.size(); ++rank)
      if (hash[rank * count + i] != hash[i]) others.push_back(rank);
    if (others.empty()) continue;
    throw MismatchError(group.rank(),
                        text("the replicas have diverged: parameter '", tensors[i].name, "' on ",
                             others.size() == 1 ? "rank " : "ranks ", enumerate(others),
                             " differs from rank 0; change parameters in the same way on all ranks, or call "
                             "sync_parameters_and_buffers() after changing them on one"));
  }
}

namespace {

ModelFact fact_of(const char* kind, const std::string& name, const at::Tensor& tensor) {
  // Gradients have the strides of their parameters, so strides must match as well.
  return {text(kind, " '", name, "'"),
          text(tensor.sizes(), ' ', tensor.scalar_type(), tensor.requires_grad() ? ", trained" : ", not trained",
               tensor.is_contiguous() ? "" : text(", strides ", tensor.strides()))};
}

// One line for each fact. Names of parameters cannot contain a tab or a line break that would affect equality.
std::string write_facts(const std::vector<ModelFact>& specs) {
  std::string result;
  for (const auto& spec : specs) result += spec.name + '\t' + spec.description + '\n';
  return result;
}

std::vector<ModelFact> read_facts(const std::string& lines) {
  std::vector<ModelFact> specs;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    size_t tab = line.find('\t');
    specs.push_back({line.substr(0, tab), line.substr(tab + 1)});
  }
  return specs;
}

/// The options that affect communication; they must match on all ranks.
std::vector<ModelFact> facts_of(const DistributedDataParallelOptions& options) {
  auto word = [](bool on) { return on ? "true" : "false"; };
  return {{"option broadcast_buffers", word(options.broadcast_buffers)},
          {"option find_unused_parameters", word(options.find_unused_parameters)},
          {"option static_graph", word(options.static_graph)},
          {"option check_finite", word(options.check_finite)},
          {"option reduce_dtype", options.reduce_dtype ? text(*options.reduce_dtype) : "that of the parameter"},
          {"option densify_sparse_gradients", word(options.densify_sparse_gradients)},
          {"option check_replicas_every", text(options.check_replicas_every)},
          {"option buckets", text("first_bytes ", options.buckets.first_bytes, ", cap_bytes ",
                                  options.buckets.cap_bytes, ", last_bytes ", options.buckets.last_bytes)}};
}

bool can_be_averaged(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

std::string why_not_trainable(const WrappedModule& model, const DistributedDataParallelOptions& options,
                              const std::optional<c10::Device>& device, const ProcessGroup& group) {
  auto because = [&](const auto&... parts) { return text("DistributedDataParallel: ", parts...); };
  if (device && *device != group.device())
    return because("option device_ids is ", *device, ", but the group's device is ", group.device(),
                   "; pass the group's device, or none");
  if (options.reduce_dtype && !can_be_averaged(*options.reduce_dtype))
    return because("option reduce_dtype is ", *options.reduce_dtype,
                   ", expected float32, float64, float16 or bfloat16");
  bool trains = false;
  for (const auto& [name, tensor] : model.parameters()) {
    trains = trains || tensor.requires_grad();
    if (const auto why = detail::why_not_writable(tensor); !why.empty()) return because("parameter '", name, "' ", why);
    if (tensor.device() != group.device())
      return because("parameter '", name, "' is on ", tensor.device(), ", but the group's device is ", group.device(),
                     "; call model->to(world.device()) before wrapping");
    const auto dtype = c10::toRealValueType(tensor.scalar_type());
    if (tensor.requires_grad() && !can_be_averaged(dtype))
      return because(
          "parameter '", name, "' has dtype ", tensor.scalar_type(),
          ", whose gradients cannot be averaged; use float32, float64, float16, bfloat16 or a complex dtype");
  }
  if (options.init_sync || options.broadcast_buffers)
    for (const auto& [name, tensor] : model.buffers())
      if (const auto why = detail::why_not_writable(tensor); !why.empty()) return because("buffer '", name, "' ", why);
  if (!trains)
    return because(
        "no parameter of the model requires a gradient, so there is nothing to average; use the model without the "
        "wrapper, or call requires_grad_() on the parameters to train");
  return {};
}

}  // namespace

std::string first_difference(const std::vector<ModelFact>& own, const std::vector<ModelFact>& other, int other_rank) {
  constexpr const char* kRemedy = "; build the same model, with the same options, on every rank";
  size_t common = std::min(own.size(), other.size());
  for (size_t i = 0; i < common; ++i) {
    if (own[i] == other[i]) continue;
    if (own[i].name == other[i].name)
      return text(own[i].name, " is ", own[i].description, ", rank ", other_rank, " has ", other[i].description,
                  kRemedy);
    return text("the model differs from rank ", other_rank, "'s at ", own[i].name, ", where rank ", other_rank, " has ",
                other[i].name, kRemedy);
  }
  if (own.size() > common)
    return text("the model has ", own[common].name, ", but rank ", other_rank, "'s does not", kRemedy);
  if (other.size() > common)
    return text("the model lacks ", other[common].name, ", but rank ", other_rank, "'s has it", kRemedy);
  return {};
}

void check_trainable(const WrappedModule& model, const DistributedDataParallelOptions& options,
                     const std::optional<c10::Device>& device, const ProcessGroup& group) {
  const auto reasons = all_gather_strings(group, why_not_trainable(model, options, device, group));
  for (size_t rank = 0; rank < reasons.size(); ++rank)
    if (!reasons[rank].empty()) throw UsageError(static_cast<int>(rank), reasons[rank]);
}

void check_same_model(const WrappedModule& model, const DistributedDataParallelOptions& options,
                      const ProcessGroup& group) {
  constexpr int kReference = 0;
  auto own = facts_of(options);
  own.push_back({"the list of parameters with sparse gradients", enumerate(model.sparse_parameters(options))});
  own.push_back({"the number of SyncBatchNorm layers", text(synced_batch_norms_over(model.module(), group))});
  for (const auto& [name, tensor] : model.parameters()) own.push_back(fact_of("parameter", name, tensor));
  for (const auto& [name, tensor] : model.buffers()) own.push_back(fact_of("buffer", name, tensor));
  auto reference = read_facts(broadcast_string(group, write_facts(own), kReference));
  const auto differences = all_gather_strings(group, first_difference(own, reference, kReference));
  for (size_t rank = 0; rank < differences.size(); ++rank)
    if (!differences[rank].empty()) throw MismatchError(static_cast<int>(rank), differences[rank]);
}

}  // namespace lockstep
