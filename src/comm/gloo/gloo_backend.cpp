#include "comm/gloo/gloo_backend.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <mutex>
#include <optional>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/gloo/connection.h"
#include "comm/reduction.h"
#include "comm/slices.h"

// Every pair of ranks talks directly, in one or two rounds. An all-reduce is a reduce-scatter, after which each rank
// has reduced its slice of the tensor in the order of ranks, and an all-gather of the slices: the same bytes on the
// wire as a ring, fewer rounds, one rounding, and the same bits everywhere.

namespace lockstep {
namespace {

using gloo_backend::Connection;
using gloo_backend::Parcel;
using gloo_backend::Shipment;

constexpr int64_t kSmallBytes = 16 << 10;       // up to this, one round with everything to everyone is faster than two
constexpr int64_t kPieceBytes = 1 << 20;        // of a slice: what is received while the piece before is reduced
constexpr uint64_t kMessageSlots = 1ull << 62;  // point to point; collectives count from 0

char* bytes_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

class GlooTransfer final : public Transfer {
 public:
  GlooTransfer(Connection& connection, Shipment shipment) : connection_(connection), shipment_(std::move(shipment)) {}

  ~GlooTransfer() override {
    if (!waiter_.valid()) return;
    shipment_.interrupt();
    waiter_.wait();
  }

  void wait(Deadline deadline) override {
    if (waiter_.valid()) {
      if (waiter_.wait_until(deadline) != std::future_status::ready)
        throw TimeoutError(text("time-out: rank ", shipment_.peer(), " did not come to this message"));
      waiter_.get();
    } else {
      connection_.finish(shipment_, deadline);
    }
  }

  // Gloo can only wait, and a wait that fails takes the connections along: somebody else has to do it.
  bool is_done() override {
    if (!waiter_.valid())
      waiter_ = std::async(std::launch::async, [this] { connection_.finish(shipment_, Deadline::max()); }).share();
    return waiter_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

 private:
  Connection& connection_;
  Shipment shipment_;
  std::shared_future<void> waiter_;
};

class GlooBackend final : public Backend {
 public:
  explicit GlooBackend(const BackendContext& context)
      : rank_(context.rank), size_(context.size), connection_(context) {}

  at::Tensor allocate(int64_t bytes) override { return at::empty({bytes}, at::kByte); }

  void abort(std::exception_ptr cause) noexcept override { connection_.abort(cause); }

  void all_reduce(const at::Tensor& data, ReduceOp op, Deadline deadline) override {
    if (static_cast<int64_t>(data.nbytes()) <= kSmallBytes) {
      auto all = gather_everything(data, deadline);
      reduce_rows(bytes_of(data), bytes_of(data), all, data, op);
      return;
    }
    Slice mine = slice_of(data.numel(), size_, rank_);
    reduce_slices(bytes_of(data) + mine.begin * data.element_size(), data, op, deadline);
    share_slices(data, deadline);
  }

  void reduce(const at::Tensor& data, ReduceOp op, int root, Deadline deadline) override {
    Slice mine = slice_of(data.numel(), size_, rank_);
    size_t mine_bytes = mine.size * data.element_size();
    if (rank_ == root) {
      reduce_slices(bytes_of(data) + mine.begin * data.element_size(), data, op, deadline);
      round({}, others([&](int peer) { return part_of(data, peer); }), deadline);
    } else {
      auto reduced = at::empty({static_cast<int64_t>(mine_bytes)}, at::kByte);
      reduce_slices(bytes_of(reduced), data, op, deadline);
      round({{root, bytes_of(reduced), mine_bytes}}, {}, deadline);
    }
  }

  void broadcast(const at::Tensor& data, int root, Deadline deadline) override {
    if (static_cast<int64_t>(data.nbytes()) <= kSmallBytes) {
      Parcel whole{root, bytes_of(data), data.nbytes()};
      if (rank_ == root)
        round(others([&](int peer) { return Parcel{peer, whole.data, whole.bytes}; }), {}, deadline);
      else
        round({}, {whole}, deadline);
      return;
    }
    // Each rank gets its slice from the root and passes it on, so that the root sends the data about twice, not once to
    // everyone.
    Parcel mine = part_of(data, rank_);
    mine.peer = root;
    if (rank_ == root)
      round(others([&](int peer) { return part_of(data, peer); }), {}, deadline);
    else
      round({}, {mine}, deadline);
    share_slices(data, deadline);
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input, Deadline deadline) override {
    char* own = bytes_of(output) + rank_ * input.nbytes();
    if (own != bytes_of(input)) std::memcpy(own, bytes_of(input), input.nbytes());
    round(others([&](int peer) {
            return Parcel{peer, own, input.nbytes()};
          }),
          others([&](int peer) {
            return Parcel{peer, bytes_of(output) + peer * input.nbytes(), input.nbytes()};
          }),
          deadline);
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, Deadline deadline) override {
    reduce_slices(bytes_of(output), input, op, deadline);
  }

  void exchange(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                Deadline deadline) override {
    if (sends[rank_].defined()) std::memcpy(bytes_of(receives[rank_]), bytes_of(sends[rank_]), sends[rank_].nbytes());
    auto parcel_in = [](const std::vector<at::Tensor>& tensors) {
      return [&tensors](int peer) {
        const auto& tensor = tensors[peer];
        return tensor.defined() ? Parcel{peer, tensor.data_ptr(), tensor.nbytes()} : Parcel{peer, nullptr, 0};
      };
    };
    round(others(parcel_in(sends)), others(parcel_in(receives)), deadline);
  }

  // Dissemination: in round k every rank hears from the one 2^k before it, and so, in the end, from all.
  void barrier(Deadline deadline) override {
    char token = 0;
    char heard = 0;
    for (int distance = 1; distance < size_; distance *= 2)
      round({{(rank_ + distance) % size_, &token, 1}}, {{(rank_ - distance + size_) % size_, &heard, 1}}, deadline);
  }

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag) override {
    Parcel parcel{to, data.data_ptr(), data.nbytes()};
    return std::make_unique<GlooTransfer>(connection_, connection_.start_send(parcel, kMessageSlots + tag));
  }

  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag) override {
    Parcel parcel{from, data.data_ptr(), data.nbytes()};
    return std::make_unique<GlooTransfer>(connection_, connection_.start_recv(parcel, kMessageSlots + tag));
  }

 private:
  /// Messages of a round that are under way.
  struct Round {
    std::vector<Shipment> receives;
    std::vector<Shipment> sends;
  };

  // One parcel for each other rank, beginning with the next one so that not all ranks turn to the same peer at once.
  template <class MakeParcel>
  std::vector<Parcel> others(MakeParcel make) const {
    std::vector<Parcel> parcels;
    for (int step = 1; step < size_; ++step) parcels.push_back(make((rank_ + step) % size_));
    return parcels;
  }

  Parcel part_of(const at::Tensor& data, int peer) const {
    Slice slice = slice_of(data.numel(), size_, peer);
    size_t width = data.element_size();
    return {peer, bytes_of(data) + slice.begin * width, slice.size * width};
  }

  // Empty parcels are not sent: both sides know their sizes.
  Round start(const std::vector<Parcel>& sends, const std::vector<Parcel>& receives) {
    Round round;
    uint64_t slot = next_slot_++;
    for (const auto& parcel : receives)
      if (parcel.bytes > 0) round.receives.push_back(connection_.start_recv(parcel, slot));
    for (const auto& parcel : sends)
      if (parcel.bytes > 0) round.sends.push_back(connection_.start_send(parcel, slot));
    return round;
  }

  void finish(Round& round, Deadline deadline) {
    for (auto& shipment : round.receives) connection_.finish(shipment, deadline);
    for (auto& shipment : round.sends) connection_.finish(shipment, deadline);
  }

  void round(const std::vector<Parcel>& sends, const std::vector<Parcel>& receives, Deadline deadline) {
    auto under_way = start(sends, receives);
    finish(under_way, deadline);
  }

  at::Tensor gather_everything(const at::Tensor& data, Deadline deadline) {
    size_t bytes = data.nbytes();
    auto all = at::empty({static_cast<int64_t>(bytes) * size_}, at::kByte);
    round(others([&](int peer) {
            return Parcel{peer, bytes_of(data), bytes};
          }),
          others([&](int peer) {
            return Parcel{peer, bytes_of(all) + peer * bytes, bytes};
          }),
          deadline);
    return all;
  }

  // `rows` holds what came from each rank, as wide as `own`, which stands in for this rank's row.
  void reduce_rows(void* output, const void* own, const at::Tensor& rows, const at::Tensor& like, ReduceOp op,
                   std::optional<int64_t> count = std::nullopt) const {
    int64_t elements = count.value_or(like.numel());
    std::vector<const void*> inputs;
    for (int r = 0; r < size_; ++r)
      inputs.push_back(r == rank_ ? own : bytes_of(rows) + r * elements * like.element_size());
    reduce_elements(output, inputs, elements, like.scalar_type(), op);
  }

  // Writes this rank's slice of `data`, reduced over all ranks, to `output`. Slices go in pieces: the next one is on
  // its way while one is reduced.
  void reduce_slices(char* output, const at::Tensor& data, ReduceOp op, Deadline deadline) {
    const int64_t width = data.element_size();
    const int64_t longest = slice_of(data.numel(), size_, 0).size;
    const int64_t piece = std::max<int64_t>(1, kPieceBytes / width);
    const Slice mine = slice_of(data.numel(), size_, rank_);
    const int64_t pieces = (longest + piece - 1) / piece;
    auto rows = at::empty({2, size_ * std::min(piece, longest) * width}, at::kByte);

    auto within = [&](Slice slice, int64_t index) {
      return Slice{slice.begin + index * piece, std::clamp<int64_t>(slice.size - index * piece, 0, piece)};
    };
    auto start_piece = [&](int64_t index) {
      Slice own = within(mine, index);
      char* to = bytes_of(rows[index % 2]);
      return start(others([&](int peer) {
                     Slice part = within(slice_of(data.numel(), size_, peer), index);
                     return Parcel{peer, bytes_of(data) + part.begin * width, static_cast<size_t>(part.size * width)};
                   }),
                   others([&](int peer) {
                     return Parcel{peer, to + peer * own.size * width, static_cast<size_t>(own.size * width)};
                   }));
    };

    auto current = start_piece(0);
    for (int64_t index = 0; index < pieces; ++index) {
      std::optional<Round> next;
      if (index + 1 < pieces) next = start_piece(index + 1);
      finish(current, deadline);
      Slice own = within(mine, index);
      reduce_rows(output + index * piece * width, bytes_of(data) + own.begin * width, rows[index % 2], data, op,
                  own.size);
      if (next) current = std::move(*next);
    }
  }

  // Every rank sends its slice of `data` to all others.
  void share_slices(const at::Tensor& data, Deadline deadline) {
    Parcel mine = part_of(data, rank_);
    round(others([&](int peer) {
            return Parcel{peer, mine.data, mine.bytes};
          }),
          others([&](int peer) { return part_of(data, peer); }), deadline);
  }

  const int rank_;
  const int size_;
  Connection connection_;
  uint64_t next_slot_ = 0;  // only the thread that makes collective calls
};

}  // namespace

std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context) {
  return std::make_unique<GlooBackend>(context);
}

}  // namespace lockstep
