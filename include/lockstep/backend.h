#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/export.h>
#include <lockstep/reduce_op.h>
#include <lockstep/store.h>

namespace lockstep {

using Deadline = std::chrono::steady_clock::time_point;

/// Information about a call, in addition to its arguments.
struct CallInfo {
  Deadline deadline{};
  /// Equal on all ranks if they make the same call. Hash of operation, dtype, element count, reduce operation, root and
  /// sequence number.
  uint64_t fingerprint = 0;
};

/// A point-to-point message in flight. Thread-safe.
class LOCKSTEP_EXPORT Transfer {
 public:
  virtual ~Transfer();

  /// Blocks until the caller may reuse the memory (send) or the memory is filled (receive).
  virtual void wait(Deadline deadline) = 0;

  virtual bool is_done() = 0;
};

/// A call that a backend has queued on a device's stream and that may still be waiting or running. Thread-safe.
class LOCKSTEP_EXPORT QueuedCall {
 public:
  virtual ~QueuedCall();

  /// Makes later work on the calling thread's current stream run after this call. Does not block.
  virtual void order_current_stream() = 0;

  /// Blocks until the device has finished the call. A call that was aborted counts as finished.
  virtual void synchronize() = 0;

  /// Throws PeerError if the backend knows that the call will never finish.
  virtual bool is_done() = 0;
};

/// Moves data between the ranks of one group. To add a backend, implement this interface and call register_backend.
///
/// ProcessGroup checks all arguments before it calls a backend. So a backend gets only dense, contiguous tensors on its
/// device, with a dtype from docs/collectives.md and at least one element, and only valid ranks. All ranks make the
/// same calls in the same order. Only one thread at a time calls the collectives and barrier. start_send and start_recv
/// may run concurrently with them; abort may be called from any thread at any time.
///
/// Data must not move between ranks whose fingerprints differ. A backend that detects the difference throws
/// MismatchError. A backend may also let such calls block, as the gloo backend does by using the fingerprint as the
/// address of its messages. The group then finds the mismatch and calls abort.
///
/// A call returns when the result is in place. A backend that queues its calls on a device returns once the call is
/// queued; see queue. A call throws PeerError if a rank is gone and TimeoutError after the deadline. After that the
/// group is broken and every later call may throw.
///
/// Results must be bitwise equal on all ranks and in all runs: reduce in the order of ranks, and accumulate half and
/// bfloat16 in float32. Two built-in backends deviate: "hierarchical" reduces inside each host first; "nccl" has its
/// own order and accumulates half and bfloat16 in their own precision.
class LOCKSTEP_EXPORT Backend {
 public:
  virtual ~Backend();

  /// Allocates memory (uint8) on which this backend's reductions are fastest, in place if possible. Not collective.
  virtual at::Tensor allocate(int64_t bytes) = 0;

  /// Wakes all blocked calls. Blocked and later calls throw `cause`. Further aborts have no effect. Must return
  /// quickly: the calling thread also monitors the job.
  virtual void abort(std::exception_ptr cause) noexcept = 0;

  virtual void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) = 0;

  /// Writes the result to `data` on rank `root`. `data` of the other ranks stays unchanged.
  virtual void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) = 0;

  virtual void broadcast(const at::Tensor& data, int root, const CallInfo& call) = 0;

  /// Concatenates the inputs of all ranks into `output`. `input` may be this rank's part of `output`.
  virtual void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) = 0;

  /// Writes this rank's part of the reduced `input` to `output`, which may be that part of `input`.
  virtual void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) = 0;

  /// Writes the reduction of inputs[r] of all ranks to the output of rank r, which may be inputs[r]. Parts may differ
  /// in size; an input or output without elements is an undefined tensor. The default, for CPU tensors, uses
  /// all_to_all_v.
  virtual void reduce_scatter_v(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op,
                                const CallInfo& call);

  /// Sends sends[r] to rank r and receives receives[r] from rank r, for every r including this rank. Parts may differ
  /// in size. An undefined tensor means that there is nothing to send or receive.
  virtual void all_to_all_v(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                            const CallInfo& call) = 0;

  virtual void barrier(const CallInfo& call) = 0;

  /// Whether ranks can access one another's memory. If not, the two calls below throw UsageError.
  virtual bool shares_memory() const { return false; }

  /// Returns memory (uint8, filled with zeros) that is the same on all ranks. It lives until every rank has released it
  /// or has ended. Returns an undefined tensor on all ranks if there is no memory.
  virtual at::Tensor allocate_shared(int64_t bytes, const CallInfo& call);

  /// A range of elements of a tensor.
  struct Range {
    int64_t begin = 0;
    int64_t size = 0;
  };
  /// Gets `count` reduced elements, the first of which is element `begin` of ranges[range].
  using Consume = std::function<void(size_t range, int64_t begin, int64_t count, const void* values)>;
  /// Reduces the ranges of `data` that this rank names, and passes the results to `consume` in parts that fit into a
  /// cache, possibly on several threads. Does not store them: `data`, which is from allocate(), stays unchanged.
  /// Returns when all ranks are done.
  virtual void reduce_ranges(const at::Tensor& data, ReduceOp op, const std::vector<Range>& ranges,
                             const Consume& consume, const CallInfo& call);

  /// The stream on which a queueing backend runs a call.
  enum class Stream {
    kCurrent,  ///< the calling thread's current stream
    kOwn,      ///< the backend's stream: concurrent with the current stream, but after the work queued there so far
  };
  /// Returns whether calls return while a device still executes them.
  virtual bool is_queueing() const { return false; }
  /// Only for a queueing backend: runs `call` with `stream` as the current stream. `call` makes one of the calls above
  /// and the copies that it needs. Returns a handle for all of this work, or null if the work is already complete. The
  /// device must execute the calls of a backend in the order in which they were made, even if they use different
  /// streams.
  virtual std::shared_ptr<QueuedCall> queue(const std::function<void()>& call, Stream stream);

  /// Start a message. Messages with the same tag between the same two ranks arrive in the order in which they were
  /// sent. The caller keeps the tensor alive. Both ends of a message have the same fingerprint; other messages in
  /// flight between the two ranks have different ones.
  virtual std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag, uint64_t fingerprint) = 0;
  virtual std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag,
                                               uint64_t fingerprint) = 0;

  /// Advances the messages in flight, without blocking, and returns whether it must be called again soon. Called while
  /// a rank waits for something else than the backend. For backends whose messages make progress only in calls.
  virtual bool advance_messages() { return false; }
};

/// Arguments of a BackendFactory.
struct BackendContext {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store;  ///< used by this group only
  c10::Device device{c10::kCPU};
  bool one_host = true;   ///< whether all ranks run on one host
  std::string address{};  ///< address of this host that the other hosts can reach; empty if unknown
  std::chrono::milliseconds timeout{};
  /// Registers a function that is called, on another thread, when the job fails. Destroying the returned object
  /// unregisters it. For factories that wait for other ranks without using the store. May be empty.
  std::function<std::shared_ptr<void>(std::function<void(std::exception_ptr)>)> on_failure{};
};

using BackendFactory = std::function<std::unique_ptr<Backend>(const BackendContext&)>;

/// Adds `name` to the values of ProcessGroupOptions::backend. Thread-safe. Throws UsageError if the name is invalid or
/// taken.
LOCKSTEP_EXPORT void register_backend(const std::string& name, BackendFactory factory);

/// Returns the names that init_process_group accepts in this build, without "auto". Thread-safe.
LOCKSTEP_EXPORT std::vector<std::string> available_backends();

}  // namespace lockstep
