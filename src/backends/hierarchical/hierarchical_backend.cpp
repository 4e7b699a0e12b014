#include "backends/factories.h"

#include <future>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "backends/common/agree.h"
#include "backends/common/reduction.h"
#include "backends/hierarchical/host_layout.h"
#include "base/text.h"
#include "rendezvous/process_id.h"

namespace lockstep {
namespace {

using hierarchical::Columns;
using hierarchical::cut_into_segments;
using hierarchical::HostLayout;

HostLayout find_layout(const BackendContext& context) {
  return HostLayout(
      context.store->all_gather("host", context.rank, context.size, this_process().host_id, context.timeout));
}

/// Derives the calls to one inner backend from one call: each gets its own fingerprint, equal on all ranks.
class Stages {
 public:
  explicit Stages(const CallInfo& call) : call_(call) {}
  CallInfo next() {
    call_.fingerprint = (call_.fingerprint ^ 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
    return call_;
  }

 private:
  CallInfo call_;
};

class HierarchicalBackend final : public Backend {
 public:
  explicit HierarchicalBackend(const BackendContext& context)
      : rank_(context.rank),
        layout_(find_layout(context)),
        host_(layout_.host_of(rank_)),
        index_(layout_.local_index_of(rank_)),
        host_size_(static_cast<int>(layout_.ranks_of(host_).size())),
        inside_(make_inside(context)),
        all_(make_gloo_backend(part(context, "all/", rank_, context.size, false))) {
    if (has_column())
      between_ = make_gloo_backend(part(context, text("column/", index_, "/"), host_, layout_.hosts(), false));
  }

  at::Tensor allocate(int64_t bytes) override { return inside_->allocate(bytes); }

  void abort(std::exception_ptr cause) noexcept override {
    inside_->abort(cause);
    all_->abort(cause);
    if (between_) between_->abort(cause);
  }

  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    if (is_narrow(data)) {
      auto wide = widened(data);
      all_reduce(wide, op, call);
      return set(data, wide);
    }
    Stages inside(call), between(call);
    const auto segments = cut_into_segments(data, layout_.columns(), kSegmentBytes);
    const auto policy = segments.size() > 1 ? std::launch::async : std::launch::deferred;
    std::future<void> crossing;  // its destructor waits even on errors: nothing may write to the tensor afterwards
    for (size_t i = 0; i <= segments.size(); ++i) {
      const Columns* next = i < segments.size() ? &segments[i] : nullptr;
      if (next) reduce_inside(*next, without_average(op), inside);
      if (i > 0) crossing.get();
      if (next) crossing = std::async(policy, [&, next] { reduce_between(*next, op, between); });
      if (i > 0) spread_inside(segments[i - 1], inside);
    }
  }

  // Works on a copy, because the data of ranks other than the root must not change.
  void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) override {
    auto copy = is_narrow(data) ? widened(data) : copied(data, data.scalar_type());
    all_reduce(copy, op, call);
    if (rank_ == root) set(data, copy);
  }

  void broadcast(const at::Tensor& data, int root, const CallInfo& call) override {
    Stages inside(call), between(call);
    const int source = layout_.host_of(root);
    if (host_ == source) inside_->broadcast(data, layout_.local_index_of(root), inside.next());
    const Columns columns(data, layout_.columns());
    if (has_column())
      for (const auto& part : columns.parts_of(index_)) between_->broadcast(part, source, between.next());
    if (host_ != source) spread_inside(columns, inside);
  }

  // Gathers inside each host, exchanges the blocks of the hosts between their first ranks, then broadcasts inside each
  // host.
  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) override {
    Stages inside(call), between(call);
    const int64_t part = input.numel();
    auto gathered = scratch(part * layout_.ranks(), input.scalar_type());  // ordered by host
    std::vector<at::Tensor> blocks;
    int64_t begin = 0;
    for (int host = 0; host < layout_.hosts(); ++host) {
      auto ranks = static_cast<int64_t>(layout_.ranks_of(host).size());
      blocks.push_back(gathered.narrow(0, begin, ranks * part));
      begin += ranks * part;
    }
    inside_->all_gather(blocks[host_], input, inside.next());
    if (index_ == 0)
      between_->all_to_all_v(blocks, std::vector<at::Tensor>(layout_.hosts(), blocks[host_]), between.next());
    inside_->broadcast(gathered, 0, inside.next());
    auto parts = output.view({layout_.ranks(), part});
    int64_t place = 0;
    for (int host = 0; host < layout_.hosts(); ++host)
      for (int rank : layout_.ranks_of(host)) parts[rank].copy_(gathered.narrow(0, part * place++, part));
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) override {
    const int64_t part = output.numel();
    auto parts = input.view({layout_.ranks(), part});
    if (!layout_.is_even() || is_narrow(input)) {
      auto copy = is_narrow(input) ? widened(parts) : copied(parts, input.scalar_type());
      all_reduce(copy, op, call);
      set(output.view({-1}), copy[rank_]);
      return;
    }
    auto copy = scratch(input.numel(), input.scalar_type()).view({layout_.ranks(), part});
    // Ordered by local index, then by host, so that the part of each column is contiguous.
    Stages inside(call), between(call);
    const ReduceOp sum = without_average(op);
    for (int rank = 0; rank < layout_.ranks(); ++rank)
      copy[layout_.local_index_of(rank) * layout_.hosts() + layout_.host_of(rank)].copy_(parts[rank]);
    auto column = copy.view({host_size_, layout_.hosts() * part})[index_];
    inside_->reduce_scatter(column, copy, sum, inside.next());
    between_->reduce_scatter(output, column, sum, between.next());
    if (op == ReduceOp::kAvg) scale(output);
  }

  void all_to_all_v(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                    const CallInfo& call) override {
    all_->all_to_all_v(receives, sends, call);
  }

  void barrier(const CallInfo& call) override { all_->barrier(call); }

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag, uint64_t fingerprint) override {
    return all_->start_send(data, to, tag, fingerprint);
  }

  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag, uint64_t fingerprint) override {
    return all_->start_recv(data, from, tag, fingerprint);
  }

 private:
  // While one segment is reduced between hosts, the next is reduced inside each host and the previous one distributed.
  static constexpr int64_t kSegmentBytes = int64_t{4} << 20;

  static BackendContext part(const BackendContext& context, const std::string& name, int rank, int size,
                             bool one_host) {
    BackendContext result = context;
    result.rank = rank;
    result.size = size;
    result.store = with_prefix(context.store, name);
    result.one_host = one_host;
    return result;
  }

  // If one host has no shared memory, all ranks throw: otherwise they would wait for that host.
  std::unique_ptr<Backend> make_inside(const BackendContext& context) const {
    std::unique_ptr<Backend> inside;
    std::string failure;
    try {
      inside = make_shm_backend(part(context, text("inside/", host_, "/"), index_, host_size_, true));
    } catch (const NoSharedMemory& error) {
      failure = error.what();
    }
    failure = agree(context, "inside", failure);
    if (!failure.empty()) throw NoSharedMemory(failure);
    return inside;
  }

  bool has_column() const { return index_ < layout_.columns(); }

  at::Tensor scratch(int64_t elements, at::ScalarType dtype) {
    return allocate(elements * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
  }
  at::Tensor copied(const at::Tensor& data, at::ScalarType dtype) {
    return scratch(data.numel(), dtype).view(data.sizes()).copy_(data);
  }

  // These dtypes are summed in float32, so that a sum in several stages is rounded once.
  static bool is_narrow(const at::Tensor& data) {
    return data.scalar_type() == at::kHalf || data.scalar_type() == at::kBFloat16;
  }
  at::Tensor widened(const at::Tensor& data) { return copied(data, at::kFloat); }
  /// Copies a result, which may be wider, to the tensor of the caller.
  static void set(const at::Tensor& data, const at::Tensor& result) {
    data.copy_(result);
    if (is_narrow(data)) make_nans_equal(data.data_ptr(), data.numel(), data.scalar_type());
  }

  // Afterwards the rank of each column has its part and the rest, reduced over this host.
  void reduce_inside(const Columns& columns, ReduceOp op, Stages& inside) {
    if (columns.has_rest()) inside_->all_reduce(columns.rest(), op, inside.next());
    if (!columns.has_parts()) return;
    if (columns.count() == host_size_)
      return inside_->reduce_scatter(columns.part(index_), columns.all_parts(), op, inside.next());
    for (int column = 0; column < columns.count(); ++column)
      inside_->reduce(columns.part(column), op, column, inside.next());
  }

  // Afterwards the rank of each column has its part and the rest, reduced over all hosts.
  void reduce_between(const Columns& columns, ReduceOp op, Stages& between) {
    if (!has_column()) return;
    for (const auto& part : columns.parts_of(index_)) {
      between_->all_reduce(part, without_average(op), between.next());
      if (op == ReduceOp::kAvg) scale(part);
    }
  }

  // Afterwards every rank of this host has the parts of all columns and the rest.
  void spread_inside(const Columns& columns, Stages& inside) {
    if (columns.has_rest() && columns.count() < host_size_) inside_->broadcast(columns.rest(), 0, inside.next());
    if (!columns.has_parts()) return;
    if (columns.count() == host_size_)
      return inside_->all_gather(columns.all_parts(), columns.part(index_), inside.next());
    for (int column = 0; column < columns.count(); ++column)
      inside_->broadcast(columns.part(column), column, inside.next());
  }

  // An average is computed as a sum in every stage and divided once by the number of all ranks.
  static ReduceOp without_average(ReduceOp op) { return op == ReduceOp::kAvg ? ReduceOp::kSum : op; }
  void scale(const at::Tensor& sum) const {
    scale_elements(sum.data_ptr(), sum.numel(), sum.scalar_type(), layout_.ranks());
  }

  const int rank_;
  const HostLayout layout_;
  const int host_;
  const int index_;
  const int host_size_;
  const std::unique_ptr<Backend> inside_;  // the ranks of this host
  const std::unique_ptr<Backend> all_;     // all ranks, for point-to-point, all_to_all_v and barrier
  std::unique_ptr<Backend> between_;       // constant after construction: the ranks of this index, one on each host
};

}  // namespace

std::unique_ptr<Backend> make_hierarchical_backend(const BackendContext& context) {
  return std::make_unique<HierarchicalBackend>(context);
}

}  // namespace lockstep
