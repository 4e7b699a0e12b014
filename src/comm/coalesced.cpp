#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/process_group.h>

#include "comm/argument_checks.h"
#include "comm/dense.h"
#include "comm/group/group.h"

// Collectives on many tensors. Small tensors of one dtype are copied into one tensor, on which one call is made.

namespace lockstep {
namespace {

using detail::Checker;
using detail::Fingerprint;
using detail::Group;
using detail::Membership;
using detail::Operation;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kAloneBytes =
    1 << 20;  // a larger tensor gets a separate call, which costs less than a copy of the tensor
constexpr int64_t kChunkBytes = 25 << 20;

/// Divides the tensors into calls, by index. Depends only on sizes and dtypes, so that all ranks make the same calls:
/// at least one, so that ranks with different lists notice.
std::vector<std::vector<size_t>> chunks_of(const Tensors& tensors) {
  struct Chunk {
    std::vector<size_t> indices{};
    int64_t bytes = 0;
  };
  std::vector<std::vector<size_t>> chunks;
  std::map<at::ScalarType, Chunk> open;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto bytes = tensors[i].defined() ? static_cast<int64_t>(tensors[i].nbytes()) : 0;
    if (bytes > kAloneBytes) {
      chunks.push_back({i});
      continue;
    }
    auto& chunk = open[tensors[i].defined() ? tensors[i].scalar_type() : at::ScalarType::Undefined];
    if (chunk.bytes + bytes > kChunkBytes) {
      chunks.push_back(std::move(chunk.indices));
      chunk = {};
    }
    chunk.indices.push_back(i);
    chunk.bytes += bytes;
  }
  for (auto& [dtype, chunk] : open) chunks.push_back(std::move(chunk.indices));
  if (chunks.empty()) chunks.emplace_back();
  return chunks;
}

Tensors pick(const Tensors& tensors, const std::vector<size_t>& indices) {
  Tensors picked;
  for (size_t index : indices) picked.push_back(tensors[index]);
  return picked;
}

Fingerprint fingerprint_of(Operation operation, const Tensors& tensors) {
  Fingerprint result{operation};
  if (tensors.size() != 1) {
    result.detail = std::to_string(tensors.size()) + " tensors";
    const char* before = " of ";
    for (const auto& tensor : tensors)
      result.detail.append(std::exchange(before, ", ")) += std::to_string(tensor.numel());
  }
  int64_t elements = 0;
  for (const auto& tensor : tensors) elements += tensor.numel();
  result.elements = elements;
  if (!tensors.empty()) result.dtype = tensors.front().scalar_type();
  return result;
}

/// Tensors with the same number of rows, side by side in one tensor [rows, columns]: the tensor itself if there is only
/// one. Undefined if there are no elements.
class Joined {
 public:
  explicit Joined(const Tensors& tensors, int64_t rows = 1) : tensors_(tensors), rows_(rows) {}

  at::Tensor read() const {
    if (tensors_.size() == 1) return *detail::dense_input(tensors_[0]);
    auto joined = room();
    if (is_plain()) {
      each_bytes(joined, [](char* part, char* tensor, size_t bytes) { std::memcpy(part, tensor, bytes); });
      return joined;
    }
    each(joined,
         [](const at::Tensor& columns, const at::Tensor& tensor) { columns.copy_(tensor.reshape(columns.sizes())); });
    return joined;
  }
  at::Tensor room() const {
    if (tensors_.size() == 1) return *detail::dense_output(tensors_[0]);
    int64_t elements = 0;
    for (const auto& tensor : tensors_) elements += tensor.numel();
    return elements == 0 ? at::Tensor() : at::empty({elements}, tensors_[0].options().requires_grad(false));
  }
  void write(const at::Tensor& joined) const {
    if (tensors_.size() == 1) return detail::store(tensors_[0], joined);
    if (is_plain())
      return each_bytes(joined, [](char* part, char* tensor, size_t bytes) { std::memcpy(tensor, part, bytes); });
    each(joined, [](const at::Tensor& columns, const at::Tensor& tensor) {
      tensor.is_contiguous() ? tensor.view(columns.sizes()).copy_(columns)
                             : tensor.copy_(columns.reshape(tensor.sizes()));
    });
  }

 private:
  // The fast path: each call through LibTorch's dispatcher takes longer than the copy of a small tensor.
  bool is_plain() const {
    return rows_ == 1 && std::all_of(tensors_.begin(), tensors_.end(), [](const at::Tensor& tensor) {
             return tensor.is_cpu() && tensor.is_contiguous() && !detail::is_lazy(tensor);
           });
  }

  // Calls visit(part of joined, memory of the tensor, bytes) for each tensor.
  template <class Visit>
  void each_bytes(const at::Tensor& joined, const Visit& visit) const {
    if (!joined.defined()) return;
    auto* part = static_cast<char*>(joined.data_ptr());
    for (const auto& tensor : tensors_) {
      const size_t bytes = tensor.nbytes();
      if (bytes > 0) visit(part, static_cast<char*>(tensor.data_ptr()), bytes);
      part += bytes;
    }
  }

  // Calls visit(columns, tensor) for each tensor with elements.
  template <class Visit>
  void each(const at::Tensor& joined, const Visit& visit) const {
    if (!joined.defined()) return;
    c10::NoGradGuard no_grad;
    const auto table = joined.view({rows_, -1});
    int64_t begin = 0;
    for (const auto& tensor : tensors_) {
      const int64_t columns = tensor.numel() / rows_;
      if (columns == 0) continue;
      visit(table.narrow(1, begin, columns), tensor.variable_data());  // bump_version() was called before
      begin += columns;
    }
  }

  const Tensors& tensors_;
  const int64_t rows_;
};

// The calls for one chunk. They keep the tensors alive.

Group::Call all_reduce_chunk(const Membership& me, const Tensors& tensors, ReduceOp op) {
  Checker check(me, Operation::kAllReduce);
  for (const auto& tensor : tensors) {
    check.writable(tensor, "a tensor");
    check.reducible(tensor, op);
  }
  detail::bump_versions(tensors);
  auto fingerprint = fingerprint_of(Operation::kAllReduce, tensors);
  fingerprint.reduce_op = op;
  return {std::move(fingerprint), [tensors, op](Backend& backend, const CallInfo& call) {
            const Joined all(tensors);
            const auto joined = all.read();
            joined.defined() ? backend.all_reduce(joined, op, call) : detail::barrier_without_data(backend, call);
            all.write(joined);
          }};
}

Group::Call broadcast_chunk(const Membership& me, const Tensors& tensors, int root) {
  Checker check(me, Operation::kBroadcast);
  check.rank_in_group(root, "src");
  const bool is_root = me.rank == root;
  for (const auto& tensor : tensors) is_root ? check.readable(tensor, "a tensor") : check.writable(tensor, "a tensor");
  if (!is_root) detail::bump_versions(tensors);
  auto fingerprint = fingerprint_of(Operation::kBroadcast, tensors);
  fingerprint.root = root;
  return {std::move(fingerprint), [tensors, root, is_root](Backend& backend, const CallInfo& call) {
            const Joined all(tensors);
            const auto joined = is_root ? all.read() : all.room();
            joined.defined() ? backend.broadcast(joined, root, call) : detail::barrier_without_data(backend, call);
            if (!is_root) all.write(joined);
          }};
}

Group::Call all_gather_chunk(const Membership& me, const Tensors& outputs, const Tensors& inputs) {
  Checker check(me, Operation::kAllGather);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check.writable(outputs[i], "an output");
    check.readable(inputs[i], "an input");
    check.same_dtype(outputs[i], inputs[i]);
    check.parts_of(outputs[i], "an output", inputs[i], "its input");
    check.no_overlap_or_in_place(outputs[i], inputs[i]);
  }
  detail::bump_versions(outputs);
  return {fingerprint_of(Operation::kAllGather, inputs),
          [outputs, inputs, ranks = me.size](Backend& backend, const CallInfo& call) {
            const Joined to(outputs, ranks);
            const auto gathered = to.room();
            gathered.defined() ? backend.all_gather(gathered, Joined(inputs).read(), call)
                               : detail::barrier_without_data(backend, call);
            to.write(gathered);
          }};
}

Group::Call reduce_scatter_chunk(const Membership& me, const Tensors& outputs, const Tensors& inputs, ReduceOp op) {
  Checker check(me, Operation::kReduceScatter);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check.writable(outputs[i], "an output");
    check.readable(inputs[i], "an input");
    check.same_dtype(outputs[i], inputs[i]);
    check.reducible(inputs[i], op);
    check.parts_of(inputs[i], "an input", outputs[i], "its output");
    check.no_overlap_or_in_place(inputs[i], outputs[i]);
  }
  detail::bump_versions(outputs);
  auto fingerprint = fingerprint_of(Operation::kReduceScatter, inputs);
  fingerprint.reduce_op = op;
  return {std::move(fingerprint), [outputs, inputs, op, ranks = me.size](Backend& backend, const CallInfo& call) {
            const Joined to(outputs);
            const auto scattered = to.room();
            scattered.defined() ? backend.reduce_scatter(scattered, Joined(inputs, ranks).read(), op, call)
                                : detail::barrier_without_data(backend, call);
            to.write(scattered);
          }};
}

/// Makes the calls for all chunks of the lists of tensors, which are checked first, and passes them to `use`.
template <class Make, class Use, class... Lists>
void for_each_call(Group& whole, const Make& make, const Use& use, const Tensors& first, const Lists&... others) {
  Group& group =
      first.empty() || !first[0].defined() ? whole.for_control() : whole.for_device(first[0].device().type());
  std::vector<Group::Call> calls;
  for (const auto& chunk : chunks_of(first))
    calls.push_back(make(group.membership(), pick(first, chunk), pick(others, chunk)...));
  for (auto& call : calls) use(group, std::move(call));
}

template <class Make, class... Lists>
void run_all(Group& whole, const CallOptions& options, const Make& make, const Lists&... lists) {
  for_each_call(
      whole, make, [&](Group& group, const Group::Call& call) { group.run(call, options); }, lists...);
}

// Calls of a group finish in order, and a call that fails breaks the group. So the last one stands for all.
template <class Make, class... Lists>
Work submit_all(Group& whole, const CallOptions& options, const Make& make, const Lists&... lists) {
  std::optional<Work> last;
  for_each_call(
      whole, make, [&](Group& group, Group::Call call) { last = group.submit(std::move(call), options); }, lists...);
  return *last;
}

void check_pairs(const ProcessGroup& group, const char* call, const Tensors& outputs, const Tensors& inputs) {
  if (outputs.size() != inputs.size())
    throw UsageError(group.rank(), text(call, ": there are ", outputs.size(), " outputs and ", inputs.size(),
                                        " inputs; give one output for each input"));
}

auto with(ReduceOp op) {
  return [op](const Membership& me, const Tensors& tensors) { return all_reduce_chunk(me, tensors, op); };
}
auto from(int src) {
  return [src](const Membership& me, const Tensors& tensors) { return broadcast_chunk(me, tensors, src); };
}
// The inputs determine the chunks.
auto gathering() {
  return [](const Membership& me, const Tensors& inputs, const Tensors& outputs) {
    return all_gather_chunk(me, outputs, inputs);
  };
}
auto scattering(ReduceOp op) {
  return [op](const Membership& me, const Tensors& inputs, const Tensors& outputs) {
    return reduce_scatter_chunk(me, outputs, inputs, op);
  };
}

}  // namespace

void ProcessGroup::all_reduce_coalesced(const Tensors& tensors, ReduceOp op, const CallOptions& options) const {
  run_all(member(), options, with(op), tensors);
}

Work ProcessGroup::all_reduce_coalesced_async(const Tensors& tensors, ReduceOp op, const CallOptions& options) const {
  return submit_all(member(), options, with(op), tensors);
}

void ProcessGroup::broadcast_coalesced(const Tensors& tensors, int src, const CallOptions& options) const {
  run_all(member(), options, from(src), tensors);
}

Work ProcessGroup::broadcast_coalesced_async(const Tensors& tensors, int src, const CallOptions& options) const {
  return submit_all(member(), options, from(src), tensors);
}

void ProcessGroup::all_gather_coalesced(const Tensors& outputs, const Tensors& inputs,
                                        const CallOptions& options) const {
  check_pairs(*this, "all_gather_coalesced", outputs, inputs);
  run_all(member(), options, gathering(), inputs, outputs);
}

Work ProcessGroup::all_gather_coalesced_async(const Tensors& outputs, const Tensors& inputs,
                                              const CallOptions& options) const {
  check_pairs(*this, "all_gather_coalesced", outputs, inputs);
  return submit_all(member(), options, gathering(), inputs, outputs);
}

void ProcessGroup::reduce_scatter_coalesced(const Tensors& outputs, const Tensors& inputs, ReduceOp op,
                                            const CallOptions& options) const {
  check_pairs(*this, "reduce_scatter_coalesced", outputs, inputs);
  run_all(member(), options, scattering(op), inputs, outputs);
}

Work ProcessGroup::reduce_scatter_coalesced_async(const Tensors& outputs, const Tensors& inputs, ReduceOp op,
                                                  const CallOptions& options) const {
  check_pairs(*this, "reduce_scatter_coalesced", outputs, inputs);
  return submit_all(member(), options, scattering(op), inputs, outputs);
}

}  // namespace lockstep
