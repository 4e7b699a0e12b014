#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>

#include <lockstep/backend.h>

#include "backends/common/reduction.h"
#include "backends/common/slices.h"
#include "backends/messages/link.h"

// Collectives built from point-to-point messages, for Gloo and MPI.
//
// Every rank exchanges messages with every other rank directly, in one or two rounds:
//   small all-reduce   every rank sends its tensor to all ranks and reduces all of them
//   large all-reduce   reduce-scatter, then all-gather. Each rank owns one slice of the tensor, reduces the slice over
//                      all ranks in the order of ranks, and sends the result to all ranks
//   reduce             the same, but results are sent only to the root
//   large broadcast    the root sends each rank its slice, and each rank sends its slice to the other ranks
// Compared with a ring: the same number of bytes, fewer rounds, one rounding, and the same bits on all ranks.
//
// barrier takes log2(ranks) rounds of tokens. reduce_slices pipelines a slice in pieces, with up to
// Link::pieces_ahead() pieces in transit, so that receiving, reducing and sending overlap. Received inputs land in a
// scratch buffer (room_) with one row per rank. If a call fails, the link may still write to its memory, so guard()
// hands all memory of the call to Link::keep.

namespace lockstep::messages {

struct Piece {
  char* data = nullptr;
  size_t bytes = 0;
};

/// A tensor cut into one slice for each rank, and each slice cut into pieces. All slices have the same number of
/// pieces; the last piece may be shorter or empty.
class Pieces {
 public:
  Pieces(const at::Tensor& data, int ranks, int64_t piece_bytes)
      : data_(static_cast<char*>(data.data_ptr())),
        elements_(data.numel()),
        width_(data.element_size()),
        step_(std::max<int64_t>(1, piece_bytes / width_)),
        ranks_(ranks) {}

  int64_t count() const { return (slice_of(elements_, ranks_, 0).size + step_ - 1) / step_; }

  Piece slice(int rank) const {
    Slice slice = slice_of(elements_, ranks_, rank);
    return {data_ + slice.begin * width_, static_cast<size_t>(slice.size * width_)};
  }

  Piece piece(int rank, int64_t index) const {
    Slice slice = slice_of(elements_, ranks_, rank);
    int64_t begin = std::min(index * step_, slice.size);
    return {data_ + (slice.begin + begin) * width_, static_cast<size_t>(std::min(step_, slice.size - begin) * width_)};
  }

 private:
  char* const data_;
  const int64_t elements_;
  const int64_t width_;  // bytes of an element
  const int64_t step_;   // elements of a piece
  const int ranks_;
};

/// Implements the collectives over a Link, which carries the messages. See the overview at the top of this file.
///
/// A Link has:
///   kSmallBytes                         largest tensor for which one round (all data to all ranks) beats two rounds
///   kPieceBytes                         size of a piece
///   part_bytes(bytes, Kind)             largest message into which a buffer of `bytes` is split
///   pieces_ahead()                      largest number of pieces in transit at a time
///   Request                             a message in transit; movable; its destructor cancels an unfinished message
///   start(Direction, Buffer, Channel)   starts a message and returns its Request
///   finish(Request&, Deadline)          blocks until the buffer is sent or filled; throws like the calls of Backend
///   start_message(Direction, tensor, peer, tag, fingerprint)   like start_send and start_recv of Backend
///   abort(cause)                        like abort of Backend
///   advance_messages()                  like advance_messages of Backend; optional
///   keep(tensor)                        keeps memory of a failed call alive if a canceled request may still use it
template <class Link>
class MessageBackend final : public Backend {
 public:
  explicit MessageBackend(const BackendContext& context)
      : rank_(context.rank), size_(context.size), others_(others(context)), link_(context) {}

  at::Tensor allocate(int64_t bytes) override { return at::empty({bytes}, at::kByte); }

  void abort(std::exception_ptr cause) noexcept override { link_.abort(cause); }

  void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) override {
    guard([&] { is_small(data) ? all_reduce_at_once(data, op, call) : all_reduce_in_pieces(data, op, call); }, data);
  }

  void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) override {
    if (rank_ == root)
      guard([&] { reduce_here(data, op, call); }, data);
    else
      reduce_for(root, data, op, call);
  }

  void broadcast(const at::Tensor& data, int root, const CallInfo& call) override {
    guard([&] { is_small(data) ? broadcast_at_once(data, root, call) : broadcast_in_slices(data, root, call); }, data);
  }

  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) override {
    size_t bytes = input.nbytes();
    char* own = bytes_of(output) + rank_ * bytes;
    if (own != bytes_of(input)) std::memcpy(own, bytes_of(input), bytes);
    guard(
        [&] {
          Requests all;
          for (int peer : others_) receive(all, {peer, bytes_of(output) + peer * bytes, bytes}, inputs(call));
          for (int peer : others_) send(all, {peer, own, bytes}, inputs(call));
          finish(all, call.deadline);
        },
        output);
  }

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) override {
    auto nothing = [](auto...) {};
    guard([&] { reduce_slices(bytes_of(output), input, op, call, nothing, nothing); }, output, input);
  }

  void all_to_all_v(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                    const CallInfo& call) override {
    if (sends[rank_].defined() && bytes_of(receives[rank_]) != bytes_of(sends[rank_]))
      std::memcpy(bytes_of(receives[rank_]), bytes_of(sends[rank_]), sends[rank_].nbytes());
    guard(
        [&] {
          Requests all;
          for (int peer : others_)
            if (const auto& part = receives[peer]; part.defined())
              receive(all, {peer, bytes_of(part), part.nbytes()}, sized(call, part));
          for (int peer : others_)
            if (const auto& part = sends[peer]; part.defined())
              send(all, {peer, bytes_of(part), part.nbytes()}, sized(call, part));
          finish(all, call.deadline);
        },
        receives, sends);
  }

  // Dissemination barrier: in round k each rank receives a token from the rank 2^k before it. After all rounds each
  // rank has received tokens from all other ranks, directly or indirectly.
  void barrier(const CallInfo& call) override {
    auto tokens = room(2);
    guard([&] {
      for (int distance = 1; distance < size_; distance *= 2) {
        Requests round;
        receive(round, {(rank_ - distance + size_) % size_, bytes_of(tokens), 1}, inputs(call));
        send(round, {(rank_ + distance) % size_, bytes_of(tokens) + 1, 1}, inputs(call));
        finish(round, call.deadline);
      }
    });
  }

  std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag, uint64_t fingerprint) override {
    return link_.start_message(Direction::kSend, data, to, tag, fingerprint);
  }

  std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag, uint64_t fingerprint) override {
    return link_.start_message(Direction::kRecv, data, from, tag, fingerprint);
  }

  bool advance_messages() override {
    if constexpr (requires { link_.advance_messages(); }) return link_.advance_messages();
    return false;
  }

 private:
  using Requests = std::vector<typename Link::Request>;

  static constexpr int64_t kKeptBytes = int64_t{16} << 20;  // a larger scratch buffer is freed after the call

  // Starts with the next rank, so that ranks do not all send to the same peer at once.
  static std::vector<int> others(const BackendContext& context) {
    std::vector<int> result;
    for (int step = 1; step < context.size; ++step) result.push_back((context.rank + step) % context.size);
    return result;
  }

  static char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }
  static bool is_small(const at::Tensor& data) { return static_cast<int64_t>(data.nbytes()) <= Link::kSmallBytes; }

  // --- messages

  static Channel inputs(const CallInfo& call) { return {call.fingerprint, Channel::Kind::kInputs}; }
  static Channel results(const CallInfo& call) { return {call.fingerprint, Channel::Kind::kResults}; }
  static Channel one_way(const CallInfo& call) { return {call.fingerprint, Channel::Kind::kOneWay}; }
  // The size is part of the channel, so that both ends match only if they expect the same size.
  static Channel sized(const CallInfo& call, const at::Tensor& part) {
    return {call.fingerprint ^ ((part.nbytes() + 1) * 0x9e3779b97f4a7c15), Channel::Kind::kOneWay};
  }

  // Empty buffers are not sent: both sides know the sizes.
  void start(Requests& requests, Direction direction, Buffer buffer, const Channel& channel) {
    for (const size_t most = Link::part_bytes(buffer.bytes, channel.kind); buffer.bytes > 0;) {
      size_t bytes = std::min(buffer.bytes, most);
      requests.push_back(link_.start(direction, {buffer.peer, buffer.data, bytes}, channel));
      buffer.data = static_cast<char*>(buffer.data) + bytes;
      buffer.bytes -= bytes;
    }
  }
  void receive(Requests& requests, const Buffer& buffer, const Channel& channel) {
    start(requests, Direction::kRecv, buffer, channel);
  }
  void send(Requests& requests, const Buffer& buffer, const Channel& channel) {
    start(requests, Direction::kSend, buffer, channel);
  }
  void finish(Requests& requests, Deadline deadline) {
    for (auto& request : requests) link_.finish(request, deadline);
    requests.clear();
  }

  // --- memory

  // Scratch memory for received inputs. The next call may reuse it.
  at::Tensor room(int64_t bytes) {
    if (!room_.defined() || room_.numel() < bytes) room_ = at::empty({bytes}, at::kByte);
    return room_;
  }

  void keep(const at::Tensor& tensor) { link_.keep(tensor); }
  void keep(const std::vector<at::Tensor>& tensors) {
    for (const auto& tensor : tensors) link_.keep(tensor);
  }

  template <class Body, class... Memory>
  void guard(const Body& body, const Memory&... memory) {
    try {
      body();
      if (room_.defined() && room_.numel() > kKeptBytes) room_.reset();
    } catch (...) {
      (keep(memory), ...);
      keep(std::exchange(room_, {}));
      throw;
    }
  }

  // --- algorithms

  void all_reduce_at_once(const at::Tensor& data, ReduceOp op, const CallInfo& call) {
    size_t bytes = data.nbytes();
    auto rows = room(static_cast<int64_t>(bytes) * size_);
    Requests all;
    all.reserve(2 * others_.size());
    for (int peer : others_) receive(all, {peer, bytes_of(rows) + peer * bytes, bytes}, inputs(call));
    for (int peer : others_) send(all, {peer, bytes_of(data), bytes}, inputs(call));
    finish(all, call.deadline);
    reduce_rows(bytes_of(data), bytes_of(data), bytes_of(rows), bytes, data.scalar_type(), op);
  }

  // The reduced slice of a peer overwrites this rank's input for that slice. That is safe: the peer sends the result
  // only after it has received the input.
  void all_reduce_in_pieces(const at::Tensor& data, ReduceOp op, const CallInfo& call) {
    const Pieces pieces(data, size_, Link::kPieceBytes);
    Requests gathered;
    reduce_slices(
        pieces.slice(rank_).data, data, op, call, [&](int64_t index) { expect_reduced(gathered, pieces, index, call); },
        [&](const Piece& reduced) {
          for (int peer : others_) send(gathered, {peer, reduced.data, reduced.bytes}, results(call));
        });
    finish(gathered, call.deadline);
  }

  // On the root: reduces its own slice in place and receives the slices that the other ranks have reduced.
  void reduce_here(const at::Tensor& data, ReduceOp op, const CallInfo& call) {
    const Pieces pieces(data, size_, Link::kPieceBytes);
    Requests gathered;
    reduce_slices(
        pieces.slice(rank_).data, data, op, call, [&](int64_t index) { expect_reduced(gathered, pieces, index, call); },
        [](const Piece&) {});
    finish(gathered, call.deadline);
  }

  void reduce_for(int root, const at::Tensor& data, ReduceOp op, const CallInfo& call) {
    const Pieces pieces(data, size_, Link::kPieceBytes);
    auto slice = at::empty({static_cast<int64_t>(pieces.slice(rank_).bytes)}, at::kByte);
    guard(
        [&] {
          Requests sent;
          reduce_slices(
              bytes_of(slice), data, op, call, [](int64_t) {},
              [&](const Piece& reduced) {
                send(sent, {root, reduced.data, reduced.bytes}, results(call));
              });
          finish(sent, call.deadline);
        },
        data, slice);
  }

  void broadcast_at_once(const at::Tensor& data, int root, const CallInfo& call) {
    Requests all;
    if (rank_ != root) receive(all, {root, bytes_of(data), data.nbytes()}, one_way(call));
    for (int peer : others_)
      if (rank_ == root) send(all, {peer, bytes_of(data), data.nbytes()}, one_way(call));
    finish(all, call.deadline);
  }

  // Each rank receives its slice from the root and sends it to the other ranks. The root also sends its own slice to
  // all ranks. So the root sends the data about twice, not once per rank.
  void broadcast_in_slices(const at::Tensor& data, int root, const CallInfo& call) {
    const Pieces pieces(data, size_, Link::kPieceBytes);
    auto buffer = [&](int peer, int slice) {
      return Buffer{peer, pieces.slice(slice).data, pieces.slice(slice).bytes};
    };
    Requests first, second;
    for (int peer : others_)
      if (rank_ != root) receive(second, buffer(peer, peer), results(call));
    if (rank_ != root) receive(first, buffer(root, rank_), one_way(call));
    for (int peer : others_)
      if (rank_ == root) send(first, buffer(peer, peer), one_way(call));
    if (rank_ != root) finish(first, call.deadline);
    for (int peer : others_)
      if (peer != root) send(second, buffer(peer, rank_), results(call));
    finish(first, call.deadline);
    finish(second, call.deadline);
  }

  // `rows` holds `bytes` of each rank, in the order of ranks. `own` replaces the row of this rank.
  void reduce_rows(void* output, const void* own, const char* rows, size_t bytes, at::ScalarType dtype,
                   ReduceOp op) const {
    c10::SmallVector<const void*, 16> sources;
    for (int rank = 0; rank < size_; ++rank) sources.push_back(rank == rank_ ? own : rows + rank * bytes);
    reduce_elements(output, {sources.data(), sources.size()}, static_cast<int64_t>(bytes / c10::elementSize(dtype)),
                    dtype, op);
  }

  // Starts to receive piece `index` of every other slice, already reduced, into its final position.
  void expect_reduced(Requests& gathered, const Pieces& pieces, int64_t index, const CallInfo& call) {
    for (int peer : others_) {
      Piece piece = pieces.piece(peer, index);
      receive(gathered, {peer, piece.data, piece.bytes}, results(call));
    }
  }

  // Writes this rank's slice of `data`, reduced over all ranks, to `output`. Calls started(index) before the messages
  // of a piece are started, and reduced(piece) when the piece is in `output`.
  template <class Started, class Reduced>
  void reduce_slices(char* output, const at::Tensor& data, ReduceOp op, const CallInfo& call, const Started& started,
                     const Reduced& reduced) {
    const Pieces pieces(data, size_, Link::kPieceBytes);
    const int64_t ahead = std::min(link_.pieces_ahead(), pieces.count());
    const int64_t rows_bytes = size_ * static_cast<int64_t>(pieces.piece(0, 0).bytes);
    auto rows = room(ahead * rows_bytes);
    auto rows_of = [&](int64_t index) { return bytes_of(rows) + index % ahead * rows_bytes; };
    auto start_piece = [&](int64_t index) {
      started(index);
      Requests piece;
      size_t bytes = pieces.piece(rank_, index).bytes;
      for (int peer : others_) receive(piece, {peer, rows_of(index) + peer * bytes, bytes}, inputs(call));
      for (int peer : others_)
        send(piece, {peer, pieces.piece(peer, index).data, pieces.piece(peer, index).bytes}, inputs(call));
      return piece;
    };

    std::deque<Requests> under_way;
    for (int64_t index = 0; index < ahead; ++index) under_way.push_back(start_piece(index));
    for (int64_t index = 0; index < pieces.count(); ++index) {
      finish(under_way.front(), call.deadline);
      under_way.pop_front();
      Piece own = pieces.piece(rank_, index);
      reduce_rows(output, own.data, rows_of(index), own.bytes, data.scalar_type(), op);
      reduced(Piece{output, own.bytes});
      output += own.bytes;
      if (index + ahead < pieces.count()) under_way.push_back(start_piece(index + ahead));
    }
  }

  const int rank_;
  const int size_;
  const std::vector<int> others_;
  Link link_;
  at::Tensor room_;  // used only by the thread that makes collective calls
};

}  // namespace lockstep::messages
