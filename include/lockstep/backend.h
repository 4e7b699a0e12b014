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

/// What a backend is told about a call beside its arguments.
struct CallInfo {
  Deadline deadline{};
  /// Equal on all ranks when they make the same call: operation, dtype, element count, reduce operation, root, and its
  /// place in the order of calls.
  uint64_t fingerprint = 0;
};

/// A message between two ranks under way. Thread-safe.
class LOCKSTEP_EXPORT Transfer {
 public:
  virtual ~Transfer();

  /// Returns when the memory is free (send) or filled (receive).
  virtual void wait(Deadline deadline) = 0;

  virtual bool is_done() = 0;
};

/// A call that a backend has put on a device's stream, where it may still wait or run. Thread-safe.
class LOCKSTEP_EXPORT QueuedCall {
 public:
  virtual ~QueuedCall();

  /// What the calling thread puts on its current stream from here on runs after the call. Does not wait for it.
  virtual void order_current_stream() = 0;

  /// Returns when the device is done with the call, also where that is because it was aborted.
  virtual void synchronize() = 0;

  /// Throws PeerError when the backend knows that it never will be.
  virtual bool is_done() = 0;
};

/// What moves bytes between the ranks of one group: implement this and call register_backend to bring your own.
///
/// ProcessGroup has checked every argument and stands between this and the user, so an implementation sees only dense,
/// contiguous tensors on its device, of a dtype in docs/collectives.md, never empty ones, and ranks in range. All ranks
/// make the same calls in the same order. The collectives and barrier run on one thread at a time; start_send and
/// start_recv may run beside them, and abort on any thread at any time.
///
/// Data must not move between ranks whose fingerprints differ. A backend that sees the difference throws MismatchError;
/// one that lets such calls wait, as Gloo's does by using the fingerprint as the address of its messages, may leave it
/// to the group, which finds out what the ranks are doing and aborts.
///
/// A call returns when the result is in place, or, with a backend that queues its calls on a device, once it is queued
/// (see queue). It throws PeerError when a rank is gone and TimeoutError after the
/// deadline; after that the group is broken and every later call may throw. Every rank must get the same bits, on every
/// run: reduce in the order of ranks. Half and bfloat16 are accumulated in float32.
class LOCKSTEP_EXPORT Backend {
 public:
  virtual ~Backend();

  /// Memory (uint8) that this backend reduces best, in place where it can. Local: other ranks need not call it.
  virtual at::Tensor allocate(int64_t bytes) = 0;

  /// Wakes every call that waits; it and all later ones throw `cause`. Further aborts change nothing. Must return soon:
  /// the thread that calls it watches over the job.
  virtual void abort(std::exception_ptr cause) noexcept = 0;

  virtual void all_reduce(const at::Tensor& data, ReduceOp op, const CallInfo& call) = 0;

  /// `data` of the other ranks than root stays as it was.
  virtual void reduce(const at::Tensor& data, ReduceOp op, int root, const CallInfo& call) = 0;

  virtual void broadcast(const at::Tensor& data, int root, const CallInfo& call) = 0;

  /// `output` holds the inputs of all ranks, one after the other. `input` may be this rank's part of `output`.
  virtual void all_gather(const at::Tensor& output, const at::Tensor& input, const CallInfo& call) = 0;

  /// `output` becomes this rank's part of the reduced `input`, and may lie at that part of it.
  virtual void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op, const CallInfo& call) = 0;

  /// Sends sends[r] to rank r and fills receives[r] from it, for every r, this rank included. Parts may differ in size;
  /// an undefined tensor stands for nothing to send or receive.
  virtual void all_to_all_v(const std::vector<at::Tensor>& receives, const std::vector<at::Tensor>& sends,
                            const CallInfo& call) = 0;

  virtual void barrier(const CallInfo& call) = 0;

  /// Where a backend whose calls return while a device still works on them (is_queueing) puts them.
  enum class Stream {
    kCurrent,  // of the calling thread
    kOwn,      // the backend's: it runs beside the current one, after what that one was given so far
  };
  virtual bool is_queueing() const { return false; }
  /// Only for such a backend: runs `call`, which makes one of the calls above and copies what must be copied for it,
  /// with that stream as the current one, and returns what stands for all of it; none when it is done already. The
  /// calls of a backend run on the device in the order in which they were made, whatever their streams.
  virtual std::shared_ptr<QueuedCall> queue(const std::function<void()>& call, Stream stream);

  /// Messages of one tag between two ranks arrive in the order they were sent. The tensor is kept by the caller. The
  /// fingerprint is equal on both ends of a message, and of no other under way between the two ranks.
  virtual std::unique_ptr<Transfer> start_send(const at::Tensor& data, int to, uint32_t tag, uint64_t fingerprint) = 0;
  virtual std::unique_ptr<Transfer> start_recv(const at::Tensor& data, int from, uint32_t tag,
                                               uint64_t fingerprint) = 0;
};

/// What a backend is made of.
struct BackendContext {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Store> store;  // of this group alone
  c10::Device device{c10::kCPU};
  bool one_host = true;   // all ranks run on one host
  std::string address{};  // of this host, on the way to the others; empty when it is not known
  std::chrono::milliseconds timeout{};
  /// For factories that wait for other ranks elsewhere than in the store: calls the function, from another thread, when
  /// the job fails, until the returned object goes. May be empty.
  std::function<std::shared_ptr<void>(std::function<void(std::exception_ptr)>)> on_failure{};
};

using BackendFactory = std::function<std::unique_ptr<Backend>(const BackendContext&)>;

/// Makes `name` a value of ProcessGroupOptions::backend. UsageError when the name is taken. Thread-safe.
LOCKSTEP_EXPORT void register_backend(const std::string& name, BackendFactory factory);

/// The names that init_process_group accepts in this build, "auto" aside.
LOCKSTEP_EXPORT std::vector<std::string> available_backends();

}  // namespace lockstep
