#include "comm/gloo/gloo_backend.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/gloo/connection.h"
#include "comm/gloo/pieces.h"
#include "comm/reduction.h"

// Every pair of ranks talks directly, in one or two rounds. An all-reduce is a reduce-scatter, after which each rank
// has reduced its slice of the tensor in the order of ranks, and an all-gather of the slices: the same bytes on the
// wire as a ring, fewer rounds, one rounding, and the same bits everywhere. Slices go in pieces, several of them under
// way, so that receiving, reducing and sending overlap.

namespace lockstep {
namespace {

using gloo_backend::Connection;
using gloo_backend::Direction;
using gloo_backend::Parcel;
using gloo_backend::Piece;
using gloo_backend::Pieces;
using gloo_backend::Shipment;

constexpr int64_t kSmallBytes = 32 << 10;  // up to this, one round with everything to everyone is faster than two
constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kPiecesAhead = 4;  // under way while one is reduced

// Gloo brings a message to the receive of the same slot, and keeps what has none waiting. Slots are made of the call's
// fingerprint, so that ranks that make different calls wait and nothing is mixed up. Collectives have the upper bit
// clear and their rounds in the lower 20, messages have it set.
constexpr uint64_t kUpperBit = 1ull << 63;
constexpr uint64_t kRounds = (1ull << 20) - 1;

uint64_t first_slot(uint64_t fingerprint) {
  return fingerprint & ~kUpperBit & ~kRounds;
}

uint64_t message_slot(uint64_t fingerprint) {
  return fingerprint | kUpperBit;
}

uint64_t sized_slot(uint64_t fingerprint, uint64_t bytes) {
  return (fingerprint ^ ((bytes + 1) * 0x9e3779b97f4a7c15)) & ~kUpperBit;
}

char* bytes_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.data_ptr());
}

/// Gloo can only wait, and a wait that fails takes all connections along: who asks whether a transfer is done has
/// another thread wait for it.
class GlooTransfer final : public Transfer {
 public:
  GlooTransfer(Connection& connection, Shipment shipment) : connection_(connection), shipment_(std::move(shipment)) {}

  // Gloo cannot take a message back: the connection would be stuck behind it.
  ~GlooTransfer() override {
    if (done_.valid() && done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) return;
    connection_.abort(
        std::make_exception_ptr(PeerError(text("the Work of a send_async or recv_async with rank ", shipment_.peer(),
                                               " was dropped before it was done; keep it and wait() for it"))));
    if (done_.valid()) done_.wait();
  }

  void wait(Deadline deadline) override {
    std::unique_lock lock(mutex_);
    if (!done_.valid()) {
      std::packaged_task<void()> waiting([&] { connection_.finish(shipment_, deadline); });
      done_ = waiting.get_future().share();
      lock.unlock();
      waiting();
    } else {
      lock.unlock();
      if (done_.wait_until(deadline) != std::future_status::ready)
        throw TimeoutError(text("time-out: rank ", shipment_.peer(), " did not come to this message"));
    }
    done_.get();
  }

  bool is_done() override {
    std::lock_guard lock(mutex_);
    if (!done_.valid())
      done_ = std::async(std::launch::async, [this] { connection_.finish(shipment_, Deadline::max()); }).share();
    return done_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

 private:
  Connection& connection_;
  Shipment shipment_;
  std::mutex mutex_;
  std::shared_future<void> done_;  // guarded by mutex_ until valid, then constant
};

class GlooBackend final : public Backend {
 public:
  explicit GlooBackend(const BackendContext& context)
      : rank_(context.rank), size_(context.size), connection_(context) {}

  at::Tensor allocate(int64_t bytes) override { return at::empty({bytes}, at::kByte); }

  void abort(std::exception_ptr cause) noexcept override { connection_.abort(cause); }

  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    begin(call);
    if (static_cast<int64_t>(data.nbytes()) <= kSmallBytes) {
      auto all = gather_everything(data, call.deadline);
      reduce_rows(bytes_of(data), bytes_of(data), bytes_of(all), data.nbytes(), data.scalar_type(), op);
      return;
    }
    Pieces pieces(data, size_, kPieceBytes);
    Round gathered = expect_reduced(pieces);
    reduce_slices(pieces.slice(rank_).data, data, op, call.deadline, [&](Piece reduced) {
      for (int peer : others()) send(gathered, {peer, reduced.data, reduced.bytes});
    });
    finish(gathered, call.deadline);
  }

  // The root's own slice is reduced in place; the others send it theirs.
  void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) override {
    begin(call);
    Pieces pieces(data, size_, kPieceBytes);
    if (rank_ == root) {
      Round gathered = expect_reduced(pieces);
      reduce_slices(pieces.slice(rank_).data, data, op, call.deadline, [](Piece) {});
      finish(gathered, call.deadline);
    } else {
      auto slice = at::empty({static_cast<int64_t>(pieces.slice(rank_).bytes)}, at::kByte);
      Round sent = open_round();  // after the memory it sends, so that it goes first when something throws
      reduce_slices(bytes_of(slice), data, op, call.deadline, [&](Piece reduced) {
        send(sent, {root, reduced.data, reduced.bytes});
      });
      finish(sent, call.deadline);
    }
  }

  void broadcast(const at::Tensor& data, int root, const CallInfo& call) override {
    begin(call);
    bool is_root = rank_ == root;
    Round first = open_round();
    if (static_cast<int64_t>(data.nbytes()) <= kSmallBytes) {
      Parcel whole{root, bytes_of(data), data.nbytes()};
      if (!is_root) receive(first, whole);
      for (int peer : others())
        if (is_root) send(first, {peer, whole.data, whole.bytes});
      finish(first, call.deadline);
      return;
    }
    // Each rank gets its slice from the root and passes it on, so that the root sends the data about twice and not once
    // to everyone; it keeps its own slice to send to all.
    Pieces pieces(data, size_, kPieceBytes);
    auto parcel = [&](int peer, int slice) {
      return Parcel{peer, pieces.slice(slice).data, pieces.slice(slice).bytes};
    };
    if (!is_root) receive(first, parcel(root, rank_));
    for (int peer : others())
      if (is_root) send(first, parcel(peer, peer));
    finish(first, call.deadline);

    Round second = open_round();
    for (int peer : others()) {
      if (!is_root) receive(second, parcel(peer, peer));
      if (peer != root) send(second, parcel(peer, rank_));
    }
    finish(second, call.deadline);
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) override {
    begin(call);
    size_t bytes = input.nbytes();
    char* own = bytes_of(output) + rank_ * bytes;
    if (own != bytes_of(input)) std::memcpy(own, bytes_of(input), bytes);
    Round round = open_round();
    for (int peer : others()) receive(round, {peer, bytes_of(output) + peer * bytes, bytes});
    for (int peer : others()) send(round, {peer, own, bytes});
    finish(round, call.deadline);
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) override {
    begin(call);
    reduce_slices(bytes_of(output), input, op, call.deadline, [](Piece) {});
  }

  void exchange(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                const CallInfo& call) override {
    begin(call);
    if (sends[rank_].defined() && bytes_of(receives[rank_]) != bytes_of(sends[rank_]))
      std::memcpy(bytes_of(receives[rank_]), bytes_of(sends[rank_]), sends[rank_].nbytes());
    Round round = open_round();
    // Both ends of a message must mean the same size: it is part of its address.
    auto swap = [&](Direction direction, const at::Tensor& part, int peer) {
      if (!part.defined()) return;
      auto& side = direction == Direction::kSend ? round.sends : round.receives;
      side.push_back(connection_.start(direction, {peer, bytes_of(part), part.nbytes()},
                                       sized_slot(call.fingerprint, part.nbytes())));
    };
    for (int peer : others()) swap(Direction::kRecv, receives[peer], peer);
    for (int peer : others()) swap(Direction::kSend, sends[peer], peer);
    finish(round, call.deadline);
  }

  // Dissemination: in round k every rank hears from the one 2^k before it, and so, in the end, from all.
  void barrier(const CallInfo& call) override {
    begin(call);
    char token = 0;
    char heard = 0;
    for (int distance = 1; distance < size_; distance *= 2) {
      Round round = open_round();
      receive(round, {(rank_ - distance + size_) % size_, &heard, 1});
      send(round, {(rank_ + distance) % size_, &token, 1});
      finish(round, call.deadline);
    }
  }

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t, uint64_t fingerprint) override {
    Parcel parcel{to, data.data_ptr(), data.nbytes()};
    return std::make_unique<GlooTransfer>(connection_,
                                          connection_.start(Direction::kSend, parcel, message_slot(fingerprint)));
  }

  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t, uint64_t fingerprint) override {
    Parcel parcel{from, data.data_ptr(), data.nbytes()};
    return std::make_unique<GlooTransfer>(connection_,
                                          connection_.start(Direction::kRecv, parcel, message_slot(fingerprint)));
  }

 private:
  /// Messages under way that share a slot: between two ranks they arrive in the order in which they were started.
  struct Round {
    uint64_t slot = 0;
    std::vector<Shipment> receives;
    std::vector<Shipment> sends;
  };

  // The rounds of one call have addresses of their own, which ranks that make another call do not know.
  void begin(const CallInfo& call) { next_slot_ = first_slot(call.fingerprint); }
  Round open_round() { return {next_slot_++, {}, {}}; }

  // Empty parcels are not sent: both sides know their sizes.
  void receive(Round& round, const Parcel& parcel) {
    if (parcel.bytes > 0) round.receives.push_back(connection_.start(Direction::kRecv, parcel, round.slot));
  }
  void send(Round& round, const Parcel& parcel) {
    if (parcel.bytes > 0) round.sends.push_back(connection_.start(Direction::kSend, parcel, round.slot));
  }
  void finish(Round& round, Deadline deadline) {
    for (auto& shipment : round.receives) connection_.finish(shipment, deadline);
    for (auto& shipment : round.sends) connection_.finish(shipment, deadline);
  }

  // The other ranks, beginning with the next one so that not all turn to the same peer at once.
  std::vector<int> others() const {
    std::vector<int> result;
    for (int step = 1; step < size_; ++step) result.push_back((rank_ + step) % size_);
    return result;
  }

  at::Tensor gather_everything(const at::Tensor& data, Deadline deadline) {
    size_t bytes = data.nbytes();
    auto all = at::empty({static_cast<int64_t>(bytes) * size_}, at::kByte);
    Round round = open_round();
    for (int peer : others()) receive(round, {peer, bytes_of(all) + peer * bytes, bytes});
    for (int peer : others()) send(round, {peer, bytes_of(data), bytes});
    finish(round, deadline);
    return all;
  }

  // `rows` holds `bytes` from each rank, one rank after the other; `own` stands in for this rank's.
  void reduce_rows(void* output, const void* own, const char* rows, size_t bytes, at::ScalarType dtype,
                   ReduceOp op) const {
    std::vector<const void*> inputs;
    for (int r = 0; r < size_; ++r) inputs.push_back(r == rank_ ? own : rows + r * bytes);
    reduce_elements(output, inputs, static_cast<int64_t>(bytes / c10::elementSize(dtype)), dtype, op);
  }

  // Starts to receive the others' slices, reduced, where they belong.
  Round expect_reduced(const Pieces& pieces) {
    Round round = open_round();
    for (int64_t index = 0; index < pieces.count(); ++index) {
      for (int peer : others()) {
        Piece piece = pieces.piece(peer, index);
        receive(round, {peer, piece.data, piece.bytes});
      }
    }
    return round;
  }

  // Writes this rank's slice of `data`, reduced over all ranks, to `output`, and shows `done` each piece of it.
  template <class Done>
  void reduce_slices(char* output, const at::Tensor& data, ReduceOp op, Deadline deadline, Done done) {
    const Pieces pieces(data, size_, kPieceBytes);
    const int64_t ahead = std::min(kPiecesAhead, pieces.count());
    const int64_t rows_bytes = size_ * static_cast<int64_t>(pieces.piece(0, 0).bytes);
    auto rows = at::empty({ahead, rows_bytes}, at::kByte);
    auto rows_of = [&](int64_t index) { return bytes_of(rows) + index % ahead * rows_bytes; };
    auto start_piece = [&](int64_t index) {
      Round round = open_round();
      size_t bytes = pieces.piece(rank_, index).bytes;
      for (int peer : others()) receive(round, {peer, rows_of(index) + peer * bytes, bytes});
      for (int peer : others()) send(round, {peer, pieces.piece(peer, index).data, pieces.piece(peer, index).bytes});
      return round;
    };

    std::deque<Round> under_way;
    for (int64_t index = 0; index < ahead; ++index) under_way.push_back(start_piece(index));
    for (int64_t index = 0; index < pieces.count(); ++index) {
      finish(under_way.front(), deadline);
      under_way.pop_front();
      Piece own = pieces.piece(rank_, index);
      reduce_rows(output, own.data, rows_of(index), own.bytes, data.scalar_type(), op);
      done(Piece{output, own.bytes});
      output += own.bytes;
      if (index + ahead < pieces.count()) under_way.push_back(start_piece(index + ahead));
    }
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
