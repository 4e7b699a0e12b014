#include "backends/factories.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <lockstep/error.h>

#include "backends/common/reduction.h"
#include "backends/common/slices.h"
#include "backends/shm/point_to_point.h"
#include "backends/shm/shared_block.h"
#include "backends/shm/shm_group.h"
#include "base/log.h"
#include "base/text.h"

// Collectives through shared memory. There are three paths, chosen by the tensor:
//
// 1. Up to kPayloadBytes: the data travels in the call header. A call is one round of waiting (ShmGroup::begin_call).
// 2. Tensors from allocate() on all ranks (broadcast: on the root), which lie in arenas: the header carries the offset.
//    Ranks read each other's tensors directly, and write to them in all_reduce and reduce. end_call blocks until all
//    ranks are done with all tensors.
// 3. Other tensors: ShmGroup::pipeline moves chunks of kChunkBytes through three slots per rank. Each rank fills its
//    slot with its input; then reduces or copies its share from all slots; then collects the results of other ranks.
//    Chunks are small enough to stay in the cache. all_to_all_v always takes this path.
//
// In a reduction each rank reduces its share of the bytes over all ranks, in the order of ranks, so all ranks get the
// same bits. On path 2 a late rank could write to a tensor after the call has failed on this rank. So a failed call
// calls give_up_call, and abort() waits for the other ranks, or detaches the tensor's memory (withdraw).

namespace lockstep {
namespace {

using shm::CallHeader;
using shm::kChunkBytes;
using shm::kPayloadBytes;
using shm::ShmGroup;

constexpr int64_t kCacheLine = 64;
constexpr std::chrono::milliseconds kReleaseLimit(200);  // abort() waits this long for other ranks
static_assert(shm::Arena::kOwnPages <= kPayloadBytes);  // every tensor that is too large for the header can be detached

int64_t size_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

uint64_t chunks_of(int64_t bytes, int64_t chunk) {
  return static_cast<uint64_t>((bytes + chunk - 1) / chunk);
}

/// A range of bytes.
struct ByteRange {
  int64_t begin = 0;
  int64_t size = 0;
};

/// The bytes of chunk k.
ByteRange chunk_of(int64_t bytes, int64_t chunk, uint64_t k) {
  int64_t begin = static_cast<int64_t>(k) * chunk;
  return {begin, std::clamp<int64_t>(bytes - begin, 0, chunk)};
}

/// The share of `rank` in `bytes`, in whole cache lines, so that no two ranks write to the same cache line.
ByteRange share_of(int64_t bytes, int size, int rank) {
  Slice lines = slice_of((bytes + kCacheLine - 1) / kCacheLine, size, rank);
  int64_t begin = std::min(bytes, lines.begin * kCacheLine);
  return {begin, std::min(bytes, (lines.begin + lines.size) * kCacheLine) - begin};
}

class ShmBackend final : public Backend {
 public:
  explicit ShmBackend(const BackendContext& context)
      : group_(shm::exchange_handles(context)), point_to_point_(*group_), rank_(context.rank), size_(context.size) {}

  at::Tensor allocate(int64_t bytes) override {
    auto arena = group_->arena();
    char* block = arena->allocate(static_cast<size_t>(bytes));
    return at::from_blob(
        block, {bytes}, [arena, block](void*) { arena->free(block); }, at::kByte);
  }

  // Also called by the thread whose call failed, after all ranks were told and before its caller sees the error.
  void abort(std::exception_ptr cause) noexcept override {
    group_->waiter().abort(std::move(cause));
    withdraw();
  }

  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    if (fits_in_call(data)) {
      begin_small(data, call);
      return reduce_payloads(data, 0, op);
    }
    run_large(
        data, call, [&] { all_reduce_large(data, op, call); }, OthersWrite::kYes);
  }

  void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) override {
    if (fits_in_call(data)) {
      begin_small(data, call);
      if (rank_ == root) reduce_payloads(data, 0, op);
      return;
    }
    const auto others_write = rank_ == root ? OthersWrite::kYes : OthersWrite::kNo;
    run_large(
        data, call, [&] { reduce_large(data, op, root, call); }, others_write);
  }

  void broadcast(const at::Tensor& data, int root, const CallInfo& call) override {
    if (fits_in_call(data)) {
      group_->begin_call(call, CallHeader::kElsewhere, bytes_of(data), rank_ == root ? data.nbytes() : 0);
      if (rank_ != root) std::memcpy(bytes_of(data), group_->header(root).payload.data(), data.nbytes());
      return;
    }
    run_large(data, call, [&] { broadcast_large(data, root, call); });
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) override {
    char* own = bytes_of(output) + rank_ * size_of(input);
    if (own != bytes_of(input)) std::memcpy(own, bytes_of(input), input.nbytes());
    if (fits_in_call(input)) {
      begin_small(input, call);
      for (int rank : others())
        std::memcpy(bytes_of(output) + rank * size_of(input), group_->header(rank).payload.data(), input.nbytes());
      return;
    }
    run_large(input, call, [&] { all_gather_large(output, input, call); });
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) override {
    if (fits_in_call(input)) {
      begin_small(input, call);
      return reduce_payloads(output, rank_ * size_of(output), op);
    }
    run_large(input, call, [&] { reduce_scatter_large(output, input, op, call); });
  }

  void all_to_all_v(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                    const CallInfo& call) override {
    auto bytes = [](const at::Tensor& part) { return part.defined() ? size_of(part) : 0; };
    std::vector<int64_t> sent;
    for (const auto& part : sends) sent.push_back(bytes(part));
    group_->begin_call(call, CallHeader::kElsewhere, sent.data(), sent.size() * sizeof(int64_t));
    auto sent_by = [&](int rank) { return reinterpret_cast<const int64_t*>(group_->header(rank).payload.data()); };
    int64_t longest = 0;
    for (int rank = 0; rank < size_; ++rank) {
      longest = std::max(longest, *std::max_element(sent_by(rank), sent_by(rank) + size_));
      if (sent_by(rank)[rank_] != bytes(receives[rank]))
        throw MismatchError(text("rank ", rank, " sends ", sent_by(rank)[rank_], " bytes, but rank ", rank_,
                                 " expects ", bytes(receives[rank])));
    }
    if (sent[rank_] > 0 && bytes_of(receives[rank_]) != bytes_of(sends[rank_]))
      std::memcpy(bytes_of(receives[rank_]), bytes_of(sends[rank_]), sends[rank_].nbytes());
    if (longest == 0) return;
    const int64_t room = room_for_each();
    group_->pipeline(
        chunks_of(longest, room), call.deadline,
        [&](uint64_t k, uint64_t slot) {
          for (int rank : others())
            if (auto piece = chunk_of(sent[rank], room, k); piece.size > 0)
              std::memcpy(input_slot(rank_, slot) + rank * room, bytes_of(sends[rank]) + piece.begin, piece.size);
        },
        [&](uint64_t k, uint64_t slot) {
          for (int rank : others())
            if (auto piece = chunk_of(bytes(receives[rank]), room, k); piece.size > 0)
              std::memcpy(bytes_of(receives[rank]) + piece.begin, input_slot(rank, slot) + rank_ * room, piece.size);
        },
        [](uint64_t, uint64_t) {});
  }

  void barrier(const CallInfo& call) override { group_->begin_call(call); }

  bool shares_memory() const override { return true; }

  // Rank 0 allocates the memory in its arena.
  at::Tensor allocate_shared(int64_t bytes, const CallInfo& call) override {
    std::shared_ptr<shm::SharedBlock> block;
    if (rank_ == 0) block = shm::SharedBlock::create(*group_, static_cast<size_t>(bytes));
    group_->begin_call(call, block ? block->offset() : CallHeader::kElsewhere);
    if (rank_ != 0 && is_shared(0)) block = shm::SharedBlock::open(*group_, group_->header(0).offset);
    group_->end_call(call.deadline);
    if (!block) return {};
    return at::from_blob(
        block->data(), {bytes}, [block](void*) {}, at::kByte);
  }

  void reduce_ranges(const at::Tensor& data, ReduceOp op, const std::vector<Range>& ranges, const Consume& consume,
                     const CallInfo& call) override {
    run_large(data, call, [&] {
      for (int rank = 0; rank < size_; ++rank)
        if (!is_shared(rank))
          throw UsageError(text("the tensor of rank ", rank, " is not in shared memory; use ProcessGroup::allocate"));
      const auto shares = shared_parts(0);
      reduce_ranges_in_cache({shares.data(), shares.size()}, data, op, ranges, consume);
      group_->end_call(call.deadline);
    });
  }

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t, uint64_t fingerprint) override {
    return point_to_point_.send(data, to, fingerprint);
  }

  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t, uint64_t fingerprint) override {
    return point_to_point_.receive(data, from, fingerprint);
  }

  bool advance_messages() override { return point_to_point_.receive_arrived(); }

 private:
  using Pointers = c10::SmallVector<void*, 16>;

  template <class Where>
  Pointers pointers_of_ranks(const Where& where) const {
    Pointers result(size_);
    for (int rank = 0; rank < size_; ++rank) result[rank] = where(rank);
    return result;
  }

  // The other ranks, starting with the next one, so that ranks do not all access the same memory at once.
  std::vector<int> others() const {
    std::vector<int> result;
    for (int step = 1; step < size_; ++step) result.push_back((rank_ + step) % size_);
    return result;
  }

  static void reduce(std::span<void* const> outputs, std::span<const void* const> inputs, int64_t bytes,
                     const at::Tensor& like, ReduceOp op) {
    reduce_elements(outputs, inputs, bytes / static_cast<int64_t>(like.element_size()), like.scalar_type(), op);
  }

  // --- data in the headers

  static bool fits_in_call(const at::Tensor& data) { return data.nbytes() <= kPayloadBytes; }

  void begin_small(const at::Tensor& data, const CallInfo& call) {
    group_->begin_call(call, CallHeader::kElsewhere, bytes_of(data), data.nbytes());
  }

  // Every rank reduces the whole tensor: a second round of waiting would cost more.
  void reduce_payloads(const at::Tensor& output, int64_t begin, ReduceOp op) const {
    auto inputs = pointers_of_ranks([&](int rank) -> void* { return group_->header(rank).payload.data() + begin; });
    void* to = bytes_of(output);
    reduce({&to, 1}, {inputs.data(), inputs.size()}, size_of(output), output, op);
  }

  // --- data in shared tensors

  enum class OthersWrite { kNo, kYes };

  // Publishes the offset of this rank's tensor. While the body runs, other ranks may read the tensor and write to it.
  template <class Body>
  void run_large(const at::Tensor& data, const CallInfo& call, const Body& body,
                 OthersWrite others_write = OthersWrite::kNo) {
    const auto offset = group_->arena()->offset_of(bytes_of(data));
    try {
      group_->begin_call(call, offset.value_or(CallHeader::kElsewhere));
      body();
      group_->check_no_rank_gave_up();
      if (group_->arena()->offset_of(bytes_of(data)) != offset)
        throw PeerError(text("another call with the same tensor failed on rank ", rank_,
                             " during this one; do not use a tensor in two calls at once"));
    } catch (...) {
      group_->give_up_call();
      if (offset && others_write == OthersWrite::kYes) {
        std::lock_guard lock(mutex_);
        exposed_ = {data, std::this_thread::get_id()};
      }
      throw;
    }
  }

  // A late or stopped rank may still write to the tensor of a failed call, while the caller already reuses that memory.
  // So this waits for the other ranks, which were told of the failure. If a rank does not stop in time, the tensor gets
  // private memory at the same address.
  void withdraw() noexcept {
    at::Tensor tensor;
    {
      std::lock_guard lock(mutex_);
      if (!exposed_.tensor.defined() || exposed_.thread != std::this_thread::get_id()) return;
      tensor = std::exchange(exposed_.tensor, at::Tensor());
    }
    try {
      if (!group_->await_release(kReleaseLimit)) group_->arena()->detach(bytes_of(tensor), tensor.nbytes());
    } catch (const Error& error) {
      log_error(text("rank ", rank_, ": a call on a tensor of ", tensor.nbytes(),
                     " bytes failed, and a late rank may still write to that tensor: ", error.what()));
    }
  }

  bool is_shared(int rank) const { return group_->header(rank).offset != CallHeader::kElsewhere; }

  bool all_are_shared() const {
    for (int rank = 0; rank < size_; ++rank)
      if (!is_shared(rank)) return false;
    return true;
  }

  Pointers shared_parts(int64_t begin) const {
    return pointers_of_ranks([&](int rank) { return shared_part(rank, begin); });
  }
  char* shared_part(int rank, int64_t begin) const { return group_->at(rank, group_->header(rank).offset) + begin; }

  // --- data that passes through slots

  char* input_slot(int rank, uint64_t slot) const { return group_->segment(rank).slots[slot].input.data(); }
  char* result_slot(int rank, uint64_t slot) const { return group_->segment(rank).slots[slot].result.data(); }

  // The bytes of a slot that are available for the data to or from each rank.
  int64_t room_for_each() const { return static_cast<int64_t>(kChunkBytes) / size_ / kCacheLine * kCacheLine; }

  // If all tensors lie in arenas, each rank reduces its share and writes the result to all tensors.
  void all_reduce_large(const at::Tensor& data, ReduceOp op, const CallInfo& call) {
    if (!all_are_shared()) return reduce_in_chunks(data, op, call, true);
    group_->check_no_rank_gave_up();
    const ByteRange own_share = share_of(size_of(data), size_, rank_);
    const auto shares = shared_parts(own_share.begin);
    reduce(shares, {shares.data(), shares.size()}, own_share.size, data, op);
    group_->end_call(call.deadline);
  }

  void reduce_large(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) {
    if (!all_are_shared()) return reduce_in_chunks(data, op, call, rank_ == root);
    group_->check_no_rank_gave_up();
    const ByteRange own_share = share_of(size_of(data), size_, rank_);
    const auto shares = shared_parts(own_share.begin);
    reduce({&shares[root], 1}, {shares.data(), shares.size()}, own_share.size, data, op);
    group_->end_call(call.deadline);
  }

  void broadcast_large(const at::Tensor& data, int root, const CallInfo& call) {
    if (is_shared(root)) {
      if (rank_ != root) std::memcpy(bytes_of(data), shared_part(root, 0), data.nbytes());
      return group_->end_call(call.deadline);
    }
    auto chunk = [&](uint64_t k) { return chunk_of(size_of(data), kChunkBytes, k); };
    group_->pipeline(
        chunks_of(size_of(data), kChunkBytes), call.deadline,
        [&](uint64_t k, uint64_t slot) {
          if (rank_ == root) std::memcpy(input_slot(root, slot), bytes_of(data) + chunk(k).begin, chunk(k).size);
        },
        [&](uint64_t k, uint64_t slot) {
          if (rank_ != root) std::memcpy(bytes_of(data) + chunk(k).begin, input_slot(root, slot), chunk(k).size);
        },
        [](uint64_t, uint64_t) {});
  }

  void all_gather_large(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) {
    auto part = [&](int rank, int64_t begin) { return bytes_of(output) + rank * size_of(input) + begin; };
    if (all_are_shared()) {
      for (int rank : others()) std::memcpy(part(rank, 0), shared_part(rank, 0), input.nbytes());
      return group_->end_call(call.deadline);
    }
    auto chunk = [&](uint64_t k) { return chunk_of(size_of(input), kChunkBytes, k); };
    group_->pipeline(
        chunks_of(size_of(input), kChunkBytes), call.deadline,
        [&](uint64_t k, uint64_t slot) {
          std::memcpy(input_slot(rank_, slot), bytes_of(input) + chunk(k).begin, chunk(k).size);
        },
        [&](uint64_t k, uint64_t slot) {
          for (int rank : others()) std::memcpy(part(rank, chunk(k).begin), input_slot(rank, slot), chunk(k).size);
        },
        [](uint64_t, uint64_t) {});
  }

  void reduce_scatter_large(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) {
    const int64_t part_bytes = size_of(output);
    if (all_are_shared()) {
      auto parts = shared_parts(rank_ * part_bytes);
      void* to = bytes_of(output);
      reduce({&to, 1}, {parts.data(), parts.size()}, part_bytes, output, op);
      return group_->end_call(call.deadline);
    }
    // Each slot holds a piece of every rank's part.
    const int64_t room = room_for_each();
    auto piece = [&](uint64_t k) { return chunk_of(part_bytes, room, k); };
    group_->pipeline(
        chunks_of(part_bytes, room), call.deadline,
        [&](uint64_t k, uint64_t slot) {
          for (int rank : others())
            std::memcpy(input_slot(rank_, slot) + rank * room, bytes_of(input) + rank * part_bytes + piece(k).begin,
                        piece(k).size);
        },
        [&](uint64_t k, uint64_t slot) {
          auto inputs = pointers_of_ranks([&](int rank) -> void* {
            return rank == rank_ ? bytes_of(input) + rank_ * part_bytes + piece(k).begin
                                 : input_slot(rank, slot) + rank_ * room;
          });
          void* to = bytes_of(output) + piece(k).begin;
          reduce({&to, 1}, {inputs.data(), inputs.size()}, piece(k).size, output, op);
        },
        [](uint64_t, uint64_t) {});
  }

  // Each rank reduces its share of every chunk; ranks with `gets_result` then collect the shares of the other ranks.
  void reduce_in_chunks(const at::Tensor& data, ReduceOp op, const CallInfo& call, bool gets_result) {
    const int64_t bytes = size_of(data);
    auto chunk = [&](uint64_t k) { return chunk_of(bytes, kChunkBytes, k); };
    auto position = [&](uint64_t k, int64_t begin) { return bytes_of(data) + chunk(k).begin + begin; };
    group_->pipeline(
        chunks_of(bytes, kChunkBytes), call.deadline,
        [&](uint64_t k, uint64_t slot) {  // copies all except this rank's share, which work() reads from the tensor
          ByteRange own_share = share_of(chunk(k).size, size_, rank_);
          int64_t own_end = own_share.begin + own_share.size;
          std::memcpy(input_slot(rank_, slot), position(k, 0), own_share.begin);
          std::memcpy(input_slot(rank_, slot) + own_end, position(k, own_end), chunk(k).size - own_end);
        },
        [&](uint64_t k, uint64_t slot) {
          ByteRange own_share = share_of(chunk(k).size, size_, rank_);
          auto inputs = pointers_of_ranks([&](int rank) -> void* {
            return rank == rank_ ? position(k, own_share.begin) : input_slot(rank, slot) + own_share.begin;
          });
          Pointers outputs;
          if (gets_result) outputs.push_back(position(k, own_share.begin));
          outputs.push_back(result_slot(rank_, slot));
          reduce({outputs.data(), outputs.size()}, {inputs.data(), inputs.size()}, own_share.size, data, op);
        },
        [&](uint64_t k, uint64_t slot) {
          if (!gets_result) return;
          for (int rank : others()) {
            ByteRange share = share_of(chunk(k).size, size_, rank);
            std::memcpy(position(k, share.begin), result_slot(rank, slot), share.size);
          }
        });
  }

  /// The tensor of a failed call, to which other ranks may still write.
  struct Exposed {
    at::Tensor tensor{};
    std::thread::id thread{};  // the thread that made the call
  };

  const std::unique_ptr<ShmGroup> group_;
  shm::PointToPoint point_to_point_;
  std::mutex mutex_;
  Exposed exposed_;  // guarded by mutex_
  const int rank_;
  const int size_;
};

}  // namespace

std::unique_ptr<Backend> make_shm_backend(const BackendContext& context) {
  return std::make_unique<ShmBackend>(context);
}

}  // namespace lockstep
