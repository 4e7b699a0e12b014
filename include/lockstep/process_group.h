#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/backend.h>
#include <lockstep/call_options.h>
#include <lockstep/export.h>
#include <lockstep/reduce_op.h>
#include <lockstep/store.h>
#include <lockstep/work.h>

namespace c10 {
struct IValue;
}

namespace lockstep {

class ProcessGroup;

namespace detail {
class Group;
const std::shared_ptr<Group>& group_of(const ProcessGroup& group);
void run_captured(const ProcessGroup& group, const std::function<void()>& replay, const CallOptions& options);
}  // namespace detail

struct NewGroupOptions {
  /// Same values as ProcessGroupOptions::backend. Default: the parent's.
  std::optional<std::string> backend{};
  /// Time limit of each call in the new group, and of creating it. Default: the parent's. The calls with which all
  /// ranks of the parent create the group use the longer of this time limit and the parent's.
  std::optional<std::chrono::milliseconds> timeout{};
  /// Source location of the call, for error messages. Filled in automatically.
  CallSite site = CallSite::here();
};

/// How all_to_all divides tensors between the ranks: rows, along dimension 0, for each rank. Empty: equal parts.
struct Splits {
  std::vector<int64_t> output{};  ///< Rows that each rank sends to this rank.
  std::vector<int64_t> input{};   ///< Rows that this rank sends to each rank.
};

/// One message of ProcessGroup::exchange.
struct Message {
  enum class Direction { kSend, kRecv };
  static Message send(at::Tensor tensor, int dst, uint32_t tag = 0) {
    return {Direction::kSend, std::move(tensor), dst, tag};
  }
  static Message recv(at::Tensor tensor, int src, uint32_t tag = 0) {
    return {Direction::kRecv, std::move(tensor), src, tag};
  }

  Direction direction{};
  at::Tensor tensor{};
  int peer = 0;
  uint32_t tag = 0;
};

/// The types of numbers that collectives accept by value.
template <class T>
concept Number = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;
template <Number T>
using WidestNumber = std::conditional_t<std::is_floating_point_v<T>, double, int64_t>;

/// A group of ranks that communicate: the counterpart of an NCCL or MPI communicator. A cheap handle to pass by value;
/// copies refer to the same group.
///
/// Collectives: every rank must make the same calls in the same order. All methods are thread-safe, but two threads
/// that call collectives must agree on their order, so call them from one thread. A synchronous call runs on the
/// calling thread if no call is pending; otherwise it waits for the pending calls first. Asynchronous calls run in the
/// order in which they were made, on a background thread of the group. For CUDA tensors, a collective queues its work
/// on a stream and returns: a synchronous call uses the current stream, an asynchronous call uses a stream of the group
/// (see Work::wait).
///
/// Results are written into the caller's tensors. Tensors may have any dtype listed in docs/collectives.md, any
/// strides, zero dimensions, no elements, or more than 2 GiB. All ranks must pass the same dtype and, unless a method
/// says otherwise, the same number of elements. An asynchronous call keeps its tensors alive; do not read or write them
/// before wait() returns. A call that writes a tensor changes its version, as in-place operators of LibTorch do, an
/// asynchronous call when it is made: backward through a saved tensor that was overwritten fails with autograd's error.
///
/// Ranks compare their calls before data moves: operation, dtype, element count, reduce operation, root, and sequence
/// number. If the calls differ, all ranks throw MismatchError, which names both calls and their source locations.
/// docs/failures.md describes how and when each backend detects this.
///
/// A group belongs to the process that created it. In a forked child, every call throws UsageError.
///
/// Failures:
///   - UsageError: an argument is invalid, the group was destroyed, or this process is not a member. Nothing was sent.
///     An invalid argument leaves the group usable.
///   - PeerError: a rank is gone. The group is broken.
///   - TimeoutError: the call did not finish in time. Names the late ranks and what they are doing. The group is
///     broken.
///   - MismatchError: ranks made different calls. The group is broken.
/// A broken group stays broken on all ranks: pending and later calls throw an error of the same type that describes
/// the first cause. The exception is monitored_barrier, whose TimeoutError leaves the group usable.
class LOCKSTEP_EXPORT ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<detail::Group> group);

  int rank() const;  // in this group; -1 if this process is not a member
  int size() const;
  int local_rank() const;  // among the group's ranks on this host
  c10::Device device() const;
  /// Returns for example "nccl", or "cpu:shm,cuda:nccl" if the group supports CPU and CUDA tensors.
  std::string backend_name() const;
  /// Returns whether calls of this group accept tensors on this type of device.
  bool supports(c10::DeviceType type) const;
  std::chrono::milliseconds timeout() const;
  /// Returns "world" for the group of all ranks, "world/1" for the first group created from it.
  const std::string& name() const;

  /// Returns whether this process is a member. On a process that is not, collectives throw UsageError.
  bool contains_me() const;
  /// Translate between ranks of this group and ranks of the job ("global" ranks). global_ranks() lists the members'
  /// global ranks in order of group rank. global_rank() throws UsageError if `group_rank` is out of range. group_rank()
  /// returns -1 if the global rank is not a member. (GroupLayout::group_rank is unrelated: it is the index of a group.)
  std::vector<int> global_ranks() const;
  int global_rank(int group_rank) const;
  int group_rank(int global_rank) const;

  /// Creates a group from some ranks of this group. Collective over this group: every rank calls it with the same
  /// arguments, members of the new group or not. `ranks` are ranks of this group. They are sorted first; the position
  /// in the sorted list is the new rank. Returns a handle on every rank; see contains_me(). Throws UsageError if
  /// `ranks` is empty or has a duplicate or an invalid rank.
  ProcessGroup new_group(std::vector<int> ranks, const NewGroupOptions& options = {}) const;
  /// Splits this group into groups of `group_size` consecutive ranks and returns the group of this rank; see
  /// GroupLayout. Collective over this group. Throws UsageError unless `group_size` divides size().
  ProcessGroup new_subgroups(int group_size, const NewGroupOptions& options = {}) const;
  /// Creates the listed groups and returns the group of this rank, or a group without this rank if no group lists it.
  /// Collective over this group. Throws UsageError if a rank is in two groups.
  ProcessGroup new_subgroups_by_enumeration(const std::vector<std::vector<int>>& groups,
                                            const NewGroupOptions& options = {}) const;

  /// Splits this group: ranks that pass the same `color` form a group, in the order of `key`, then of rank. Returns the
  /// group of this rank, or a group without this rank if its color is negative. Collective over this group; unlike in
  /// the methods above, a rank need not know the colors of others. MPI_Comm_split in MPI.
  ProcessGroup split_group(int color, int key = 0, const NewGroupOptions& options = {}) const;

  /// Reduces `tensor` over all ranks; every rank gets the result.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  [[nodiscard]] Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                                      const CallOptions& options = {}) const;

  /// Reduces `tensor` to rank `dst`. The tensors of the other ranks stay unchanged.
  void reduce(const at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  [[nodiscard]] Work reduce_async(const at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::kSum,
                                  const CallOptions& options = {}) const;

  /// The same for one number, which is returned: `double mean = world.all_reduce(loss, ReduceOp::kAvg)`. Integers are
  /// reduced as int64_t, others as double. Blocks until the result is known, on a GPU too.
  template <Number T>
  [[nodiscard]] T all_reduce(T value, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const {
    return static_cast<T>(all_reduce_number(static_cast<WidestNumber<T>>(value), op, options));
  }

  /// Copies the tensor of rank `src` to all ranks.
  void broadcast(const at::Tensor& tensor, int src, const CallOptions& options = {}) const;
  [[nodiscard]] Work broadcast_async(const at::Tensor& tensor, int src, const CallOptions& options = {}) const;

  /// Returns the number that rank `src` passed.
  template <Number T>
  [[nodiscard]] T broadcast(T value, int src, const CallOptions& options = {}) const {
    return static_cast<T>(broadcast_number(static_cast<WidestNumber<T>>(value), src, options));
  }

  /// Concatenates the inputs of all ranks, in order of rank, into `output`, which has size() times the elements of
  /// `input`. `input` may be this rank's part of `output`.
  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {}) const;
  [[nodiscard]] Work all_gather_async(const at::Tensor& output, const at::Tensor& input,
                                      const CallOptions& options = {}) const;
  /// Copies the input of rank r to outputs[r]. Inputs may differ in size between ranks.
  void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                  const CallOptions& options = {}) const;
  [[nodiscard]] Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                      const CallOptions& options = {}) const;

  /// Returns the numbers of all ranks, in order of rank.
  template <Number T>
  [[nodiscard]] std::vector<T> all_gather(T value, const CallOptions& options = {}) const {
    const auto all = all_gather_number(static_cast<WidestNumber<T>>(value), options);
    return {all.begin(), all.end()};
  }

  /// On rank `dst`, copies the input of rank r to outputs[r]. The other ranks pass no outputs. Inputs may differ in
  /// size.
  void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst,
              const CallOptions& options = {}) const;
  [[nodiscard]] Work gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst,
                                  const CallOptions& options = {}) const;

  /// Copies inputs[r] of rank `src` to the output of rank r. The other ranks pass no inputs. Parts may differ in size.
  void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
               const CallOptions& options = {}) const;
  [[nodiscard]] Work scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
                                   const CallOptions& options = {}) const;

  /// Reduces `input`, which has size() times the elements of `output`, and copies part r of the result to the output of
  /// rank r. `output` may be this rank's part of `input`.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      const CallOptions& options = {}) const;
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                          ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  /// Reduces inputs[r] to the output of rank r. Inputs may differ in size, but inputs[r] has the same size on all
  /// ranks. `output` may be inputs[rank].
  void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op = ReduceOp::kSum,
                      const CallOptions& options = {}) const;
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                          ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;

  /// Sends inputs[r] to rank r and receives outputs[r] from rank r. Parts may differ in size.
  void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                  const CallOptions& options = {}) const;
  [[nodiscard]] Work all_to_all_async(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                      const CallOptions& options = {}) const;
  /// The same for parts that lie one after the other: sends rows of `input` to each rank, and writes the rows from each
  /// rank, in order of rank, to `output`.
  void all_to_all(const at::Tensor& output, const at::Tensor& input, const Splits& splits = {},
                  const CallOptions& options = {}) const;
  [[nodiscard]] Work all_to_all_async(const at::Tensor& output, const at::Tensor& input, const Splits& splits = {},
                                      const CallOptions& options = {}) const;

  /// Many tensors in few calls. Small tensors of one dtype travel together; large ones are not copied. All tensors are
  /// on one type of device. Every rank passes as many tensors, of the same sizes and dtypes, in the same order. The
  /// tensors of a call must not share memory.
  void all_reduce_coalesced(const std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::kSum,
                            const CallOptions& options = {}) const;
  [[nodiscard]] Work all_reduce_coalesced_async(const std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::kSum,
                                                const CallOptions& options = {}) const;
  void broadcast_coalesced(const std::vector<at::Tensor>& tensors, int src, const CallOptions& options = {}) const;
  [[nodiscard]] Work broadcast_coalesced_async(const std::vector<at::Tensor>& tensors, int src,
                                               const CallOptions& options = {}) const;
  /// outputs[i] is the result of all_gather for inputs[i].
  void all_gather_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                            const CallOptions& options = {}) const;
  [[nodiscard]] Work all_gather_coalesced_async(const std::vector<at::Tensor>& outputs,
                                                const std::vector<at::Tensor>& inputs,
                                                const CallOptions& options = {}) const;
  /// outputs[i] is the result of reduce_scatter for inputs[i].
  void reduce_scatter_coalesced(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  [[nodiscard]] Work reduce_scatter_coalesced_async(const std::vector<at::Tensor>& outputs,
                                                    const std::vector<at::Tensor>& inputs, ReduceOp op = ReduceOp::kSum,
                                                    const CallOptions& options = {}) const;

  /// Send and receive one message. Messages may be interleaved freely with collectives. Messages with the same tag
  /// between the same two ranks arrive in the order in which they were sent. A rank cannot send to itself. A receive
  /// must have the dtype and element count of its send. send() and recv() block until the message is sent or received,
  /// for CUDA tensors too.
  void send(const at::Tensor& tensor, int dst, uint32_t tag = 0, const CallOptions& options = {}) const;
  [[nodiscard]] Work send_async(const at::Tensor& tensor, int dst, uint32_t tag = 0,
                                const CallOptions& options = {}) const;
  void recv(const at::Tensor& tensor, int src, uint32_t tag = 0, const CallOptions& options = {}) const;
  [[nodiscard]] Work recv_async(const at::Tensor& tensor, int src, uint32_t tag = 0,
                                const CallOptions& options = {}) const;

  /// Receives a message with this tag from the rank that sends one first, and returns that rank. The sender is found
  /// through the store, which takes longer than recv(). While several ranks send, they take turns. Only one thread at a
  /// time may receive with this tag. If no rank sends in time, throws TimeoutError, and the group stays usable. A
  /// message that was announced but does not arrive in time breaks the group, as in recv().
  int recv_any(const at::Tensor& tensor, uint32_t tag = 0, const CallOptions& options = {}) const;

  /// Sends and receives several messages at once, in any order, as in a halo exchange. Tensors and ranks are checked
  /// before the first message starts. exchange() blocks until all messages are sent and received; exchange_async()
  /// returns the Work of each message.
  void exchange(const std::vector<Message>& messages, const CallOptions& options = {}) const;
  [[nodiscard]] std::vector<Work> exchange_async(const std::vector<Message>& messages,
                                                 const CallOptions& options = {}) const;

  /// Blocks until all earlier calls of this rank are complete, including work on a GPU. Throws if the group is broken.
  void synchronize() const;

  /// Blocks until every rank has called it.
  void barrier(const CallOptions& options = {}) const;
  [[nodiscard]] Work barrier_async(const CallOptions& options = {}) const;

  /// Blocks until every rank has called it. Throws TimeoutError, which names every rank that has not called it; the
  /// group stays usable. Goes through the store, not the backend: slower than barrier(), but works while the backend
  /// hangs.
  void monitored_barrier(const CallOptions& options = {}) const;

  /// Collectives for objects: None, strings, booleans, numbers, dense CPU tensors, and lists, tuples and dictionaries
  /// of these. Tensors are copied. broadcast_object and scatter_object ignore the object argument on ranks other than
  /// `src`. Throws UsageError on the sender and on the receivers if an object cannot be serialized, and MismatchError
  /// if another rank sends bytes that are no object; the group stays usable.
  c10::IValue broadcast_object(const c10::IValue& object, int src, const CallOptions& options = {}) const;
  std::vector<c10::IValue> all_gather_object(const c10::IValue& object, const CallOptions& options = {}) const;
  /// Returns an empty vector on ranks other than `dst`.
  std::vector<c10::IValue> gather_object(const c10::IValue& object, int dst, const CallOptions& options = {}) const;
  /// On rank `src`, `objects` has one object for each rank.
  c10::IValue scatter_object(const std::vector<c10::IValue>& objects, int src, const CallOptions& options = {}) const;
  /// Send and receive one object. Each object is two messages with this tag; see send().
  void send_object(const c10::IValue& object, int dst, uint32_t tag = 0, const CallOptions& options = {}) const;
  c10::IValue recv_object(int src, uint32_t tag = 0, const CallOptions& options = {}) const;
  /// Returns the sender and its object; see recv_any().
  std::pair<int, c10::IValue> recv_any_object(uint32_t tag = 0, const CallOptions& options = {}) const;

  /// Allocates a tensor on device() in memory that the backend can reduce without a copy. Not collective. The contents
  /// are undefined.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Waits for the pending calls of this rank, then leaves the group. Not collective. Later calls of this rank throw
  /// UsageError. Other ranks get PeerError if they call a collective of the group afterwards. Destroying the last
  /// handle also leaves the group.
  void destroy() const;

  /// Breaks the group. Not collective. All waiting and all later calls throw PeerError with `reason`, on all ranks.
  void abort(const std::string& reason) const;

  /// Returns whether both handles refer to the same group.
  friend bool operator==(const ProcessGroup&, const ProcessGroup&) = default;

 private:
  friend void detail::run_captured(const ProcessGroup&, const std::function<void()>&, const CallOptions&);
  friend const std::shared_ptr<detail::Group>& detail::group_of(const ProcessGroup&);
  detail::Group& member() const;
  double all_reduce_number(double value, ReduceOp op, const CallOptions& options) const;
  int64_t all_reduce_number(int64_t value, ReduceOp op, const CallOptions& options) const;
  double broadcast_number(double value, int src, const CallOptions& options) const;
  int64_t broadcast_number(int64_t value, int src, const CallOptions& options) const;
  std::vector<double> all_gather_number(double value, const CallOptions& options) const;
  std::vector<int64_t> all_gather_number(int64_t value, const CallOptions& options) const;

  std::shared_ptr<detail::Group> group_;  // constant after construction
};

struct ProcessGroupOptions {
  /// "auto", a name from available_backends(), or one name for each device: "cpu:gloo,cuda:nccl". "auto" uses NCCL for
  /// CUDA tensors. For CPU tensors it uses shared memory on one host; on several hosts it uses Gloo, combined with
  /// shared memory inside each host if a host has several ranks. docs/collectives.md has the details.
  std::string backend = "auto";
  /// How ranks find each other. "tcp://host:port": rank 0 listens there. "file:///path": a file that does not exist
  /// yet, in a directory that all ranks can access and only this user can write. "env://": from MASTER_ADDR and
  /// MASTER_PORT, or from other variables of the launcher (docs/environment.md). Ignored if there is only one rank.
  std::string init_method = "env://";
  /// `rank` and `world_size`: set both or neither. Default: from the environment, see Environment.
  std::optional<int> rank{};
  std::optional<int> world_size{};
  /// Time limit of init_process_group, and default time limit of each call of the group. At least 1 ms.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Device of this rank's tensors. Default: a GPU if this host has one for each of its ranks and the backend supports
  /// CUDA tensors, otherwise the CPU. The GPU is the only visible one, or the one with the index local_rank. If `rank`
  /// is set and there are several ranks, the local rank is unknown: the default is then the CPU, and a backend for CUDA
  /// tensors alone throws UsageError.
  std::optional<c10::Device> device{};
  /// Store in which the ranks find each other, instead of `init_method`.
  std::shared_ptr<Store> store{};
  /// A rank that sends no heartbeat for this long counts as gone: its process is stopped, or its host or network is
  /// down. At least 500 ms. The end of a process is detected at once. A process that a debugger holds may be silent for
  /// longer.
  std::chrono::milliseconds heartbeat_limit = std::chrono::seconds(5);
};

/// Joins the job and returns the group of all its ranks. Collective: blocks until all ranks have joined. Throws
///   - TimeoutError, which names the missing ranks,
///   - PeerError, which names a rank that died while joining,
///   - MismatchError, which names two ranks that disagree about the job,
///   - UsageError for an invalid environment or option,
///   - SystemError if, for example, the port is in use.
///
/// Rank 0's process hosts the job's store, unless the launcher does. Let that process exit last.
///
/// A process may destroy its group and join again if the rendezvous is at a port (env://, tcp://) and all ranks join
/// equally often. A file, or a store passed in `store`, can be used for one join only.
LOCKSTEP_EXPORT ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

}  // namespace lockstep
