#include "optim/zero/sharded_memory.h"

#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "comm/shared_memory_calls.h"
#include "optim/layout.h"

namespace lockstep::detail {
namespace {

// The alignment of LibTorch's GPU allocator, so that matrices have the alignment that the fastest kernels need.
constexpr int64_t kShardAlignBytes = 512;

/// Rank 0's storages and offsets, because all ranks need the same plan. Collective.
std::vector<ParameterRange> ranges_of(const std::vector<at::Tensor>& parameters, const ProcessGroup& group) {
  const auto count = static_cast<int64_t>(parameters.size());
  auto places = at::empty({count, 2}, at::kLong);
  auto* place = places.data_ptr<int64_t>();
  std::map<const void*, int64_t> first;  // parameter of each storage
  for (int64_t i = 0; i < count; ++i) {
    const auto& parameter = parameters[i];
    const bool is_dense = parameter.is_non_overlapping_and_dense();
    place[2 * i] = is_dense ? first.emplace(parameter.storage().unsafeGetStorageImpl(), i).first->second : i;
    place[2 * i + 1] = parameter.storage_offset();
  }
  places = places.to(group.device());
  group.broadcast(places, 0);
  places = places.cpu();
  place = places.data_ptr<int64_t>();
  std::vector<ParameterRange> ranges;
  for (int64_t i = 0; i < count; ++i) ranges.push_back({place[2 * i], place[2 * i + 1], parameters[i].numel()});
  return ranges;
}

/// The deleter is the mark by which is_shared_between_ranks() recognizes the memory: it belongs to the storage, so that
/// all tensors of the storage have it. The context owns the memory.
void release_shared_memory(void* owner) {
  delete static_cast<at::Tensor*>(owner);
}

at::Tensor marked_as_shared(const at::Tensor& memory) {
  auto owner = std::make_unique<at::Tensor>(memory);
  c10::DataPtr pointer(memory.data_ptr(), owner.get(), &release_shared_memory, memory.device());
  owner.release();
  const c10::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(), std::move(pointer));
  return at::empty({0}, memory.options()).set_(storage, 0, memory.sizes(), memory.strides());
}

}  // namespace

bool is_shared_between_ranks(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &release_shared_memory;
}

ShardedMemory::ShardedMemory(const ProcessGroup& group, std::vector<at::Tensor> parameters, ShardBy by, Buffer buffer)
    : group_(group), parameters_(std::move(parameters)) {
  const c10::NoGradGuard no_grad;
  const auto dtype = parameters_.front().scalar_type();
  std::vector<int64_t> sizes;
  for (const auto& parameter : parameters_) sizes.push_back(parameter.numel());
  plan_ = plan_shards(ranges_of(parameters_, group), group.size(), by,
                      kShardAlignBytes / static_cast<int64_t>(c10::elementSize(dtype)));
  pieces_ = detail::pieces_of(plan_, sizes, group.rank());
  memory_ = buffer == Buffer::kShared
                ? marked_as_shared(allocate_shared(group, plan_.elements(), dtype, kInConstructor))
                : group.allocate({plan_.elements()}, dtype).zero_();  // the padding is sent as well
  sent_ = memory_.variable_data();
  shares_ = shares_of(sent_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    const auto place = memory_.narrow(0, plan_.offsets[i], sizes[i]);
    parameter_views_.push_back((parameter.is_non_overlapping_and_dense()
                                    ? place.as_strided(parameter.sizes(), parameter.strides())
                                    : place.view(parameter.sizes()))
                                   .detach());
    if (buffer == Buffer::kOwn || group.rank() == 0) parameter_views_.back().copy_(parameter);
  }
}

std::vector<ShardPiece> ShardedMemory::pieces_of(int rank) const {
  std::vector<int64_t> sizes;
  for (const auto& parameter : parameters_) sizes.push_back(parameter.numel());
  return detail::pieces_of(plan_, sizes, rank);
}

void ShardedMemory::move_parameters() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(parameter_views_[i]);
    // Parameters that were views of one tensor share its version: an update of one parameter would look like a write to
    // all of them.
    auto* impl = parameters_[i].unsafeGetTensorImpl();
    impl->set_version_counter(c10::VariableVersion(impl->version_counter().current_version()));
  }
}

std::optional<size_t> ShardedMemory::first_difference() const {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto own = parameters_[i].contiguous().resolve_conj().resolve_neg(), first = parameter_views_[i].contiguous();
    if (own.nbytes() > 0 && std::memcmp(own.data_ptr(), first.data_ptr(), own.nbytes()) != 0) return i;
  }
  return std::nullopt;
}

std::vector<at::Tensor> ShardedMemory::shares_of(const at::Tensor& buffer) const {
  std::vector<at::Tensor> shares;
  for (int rank = 0; rank < group_.size(); ++rank)
    shares.push_back(buffer.narrow(0, plan_.begins[rank], plan_.size_of(rank)));
  return shares;
}

at::Tensor ShardedMemory::values(const ShardPiece& piece, const at::Tensor& buffer) const {
  return values_at(plan_.offsets[piece.parameter] + piece.begin, piece, buffer);
}

at::Tensor ShardedMemory::values_in_share(const ShardPiece& piece, const at::Tensor& share) const {
  return values_at(plan_.offsets[piece.parameter] + piece.begin - plan_.begins[group_.rank()], piece, share);
}

at::Tensor ShardedMemory::values_at(int64_t offset, const ShardPiece& piece, const at::Tensor& buffer) const {
  const auto& view = parameter_views_[piece.parameter];
  const auto row = buffer.narrow(0, offset, piece.size);
  return (is_whole(piece) ? row.as_strided(view.sizes(), view.strides()) : row).detach();
}

at::Tensor ShardedMemory::gradient(const ShardPiece& piece) const {
  const auto& parameter = parameters_[piece.parameter];
  const auto& gradient = parameter.grad();
  if (!gradient.defined() || is_whole(piece)) return gradient;
  return as_row(laid_out_as(parameter, gradient)).narrow(0, piece.begin, piece.size).detach();
}

bool ShardedMemory::restore_storage(size_t index) const {
  const auto &parameter = parameters_[index], &view = parameter_views_[index];
  if (parameter.data_ptr() == view.data_ptr()) return true;
  if (parameter.sizes() != view.sizes() || parameter.dtype() != view.dtype() || parameter.device() != view.device())
    return false;
  view.copy_(parameter);
  parameter.set_data(view);
  return true;
}

void ShardedMemory::gather(const CallOptions& options) const {
  const c10::NoGradGuard no_grad;
  if (group_.size() == 1) return;
  if (plan_.is_even())
    group_.all_gather(sent_, shares_[group_.rank()], options);
  else
    group_.all_gather(shares_, shares_[group_.rank()], options);
}

Work ShardedMemory::gather_async(const CallOptions& options) const {
  const c10::NoGradGuard no_grad;
  return plan_.is_even() ? group_.all_gather_async(sent_, shares_[group_.rank()], options)
                         : group_.all_gather_async(shares_, shares_[group_.rank()], options);
}

void ShardedMemory::reduce_scatter(const at::Tensor& share, const at::Tensor& buffer,
                                   const CallOptions& options) const {
  if (plan_.is_even())
    group_.reduce_scatter(share, buffer, ReduceOp::kAvg, options);
  else
    group_.reduce_scatter(share, shares_of(buffer), ReduceOp::kAvg, options);
}

Work ShardedMemory::reduce_scatter_async(const at::Tensor& share, const at::Tensor& buffer,
                                         const CallOptions& options) const {
  return plan_.is_even() ? group_.reduce_scatter_async(share, buffer, ReduceOp::kAvg, options)
                         : group_.reduce_scatter_async(share, shares_of(buffer), ReduceOp::kAvg, options);
}

}  // namespace lockstep::detail
