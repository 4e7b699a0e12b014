#pragma once

#include <memory>

#include <lockstep/backend.h>
#include <lockstep/error.h>

// The backends of lockstep. Each factory is collective: every rank of the group calls it.

namespace lockstep {

/// Ranks are threads of one process.
std::unique_ptr<Backend> make_threads_backend(const BackendContext& context);

/// The ranks are on one host, but at least one of them cannot map another's memory. Thrown on all ranks.
class NoSharedMemory : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Ranks are processes or threads of one host, connected through shared memory. Throws NoSharedMemory.
///
/// Tensors from allocate() live in shared memory and are reduced, gathered and scattered in place, without a copy.
/// Other tensors pass through a pipeline of slots, in chunks that stay in the cache. Small tensors travel in the call
/// header. When a call fails, its tensor is out of reach of other ranks before the caller sees the error.
std::unique_ptr<Backend> make_shm_backend(const BackendContext& context);

/// Ranks are processes on one or several hosts, connected by TCP.
///
/// Gloo only carries the messages; the algorithms are in messages/. Gloo's own collectives round half precision in
/// every step and have neither AVG nor bfloat16.
std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context);

/// Ranks are processes that mpirun started, on the network that MPI uses.
///
/// MPI only carries the messages; the algorithms are in messages/. A thread that blocks in one of MPI's collectives
/// cannot be woken when a rank is lost. They also reduce in an unspecified order and have neither AVG nor half
/// precision.
std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context);

/// Ranks are processes on several hosts: shared memory inside each host, Gloo between hosts. The bytes of a host cross
/// the network once, not once for each of its ranks.
///
/// All-reduce is a reduce-scatter inside each host, an all-reduce between the ranks of equal index on all hosts, and an
/// all-gather inside each host: 2N(h-1)/h bytes leave each of h hosts. A large tensor is cut into segments, so that
/// memory and network work at the same time. Half and bfloat16 are sent as float32, so that a sum is rounded once.
std::unique_ptr<Backend> make_hierarchical_backend(const BackendContext& context);

/// Ranks are processes with one GPU each, connected by NCCL. Calls are queued on the device: see Backend::queue.
/// UsageError when two ranks have the same GPU.
std::unique_ptr<Backend> make_nccl_backend(const BackendContext& context);

}  // namespace lockstep
