#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
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
void run_captured(const ProcessGroup& group, const std::function<void()>& replay, const CallOptions& options);
}  // namespace detail

struct NewGroupOptions {
  /// As in ProcessGroupOptions; the parent's when not given.
  std::optional<std::string> backend{};
  /// For each of its calls, and for its members to find each other; the parent's when not given. That all ranks of the
  /// parent come is a call of the parent, and has the parent's time-out if that is longer.
  std::optional<std::chrono::milliseconds> timeout{};
  /// Where the call stands; filled in by itself.
  CallSite site = CallSite::here();
};

/// The ranks that train together. A cheap handle that you pass by value; copies mean the same group.
///
/// Collective calls: every rank must make the same ones in the same order. Make them from one thread, or order them
/// yourself; the handle itself is thread-safe. A call with nothing pending runs on the calling thread; asynchronous
/// ones run in the order they were made on a thread of the group, and a synchronous call waits its turn behind them.
///
/// Tensors are changed in place and may be of any dtype in docs/collectives.md, contiguous or not, 0-dimensional,
/// empty, or larger than 2 GiB. On all ranks they must have the same dtype and number of elements. An asynchronous call
/// keeps its tensors alive; do not touch them before wait().
///
/// Before data moves, ranks compare what they call: operation, dtype, element count, reduce operation, root, and the
/// place in the order of calls. Ranks that disagree all get MismatchError, naming both sides and where their calls
/// stand in the program (docs/failures.md says how and when).
///
/// A group belongs to the process that made it: in a child which that process forks, calls throw UsageError.
///
/// Errors: UsageError before anything is sent, and the group goes on. Any other error breaks the group on all ranks:
/// every later call throws it again. PeerError: a rank is gone. TimeoutError: a call did not finish in time; says who
/// is late and what they do instead.
class LOCKSTEP_EXPORT ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<detail::Group> group);

  int rank() const;  // in this group; -1 when this process is not in it
  int size() const;
  int local_rank() const;  // among the ranks of the group on this host
  c10::Device device() const;
  /// "nccl", or "cpu:shm,cuda:nccl" of a group that moves tensors of both devices.
  std::string backend_name() const;
  /// Whether tensors on such a device can be given to its calls.
  bool moves(c10::DeviceType type) const;
  std::chrono::milliseconds timeout() const;
  /// "world" for the group of all ranks, "world/1" for the first that was made of it.
  const std::string& name() const;

  /// Whether this process is in the group. If not, its collectives are not for it and throw UsageError.
  bool contains_me() const;
  /// The members as ranks of the job, by their rank here; and translations of one: -1 for a rank that is not here,
  /// UsageError for one that cannot be. (GroupLayout's group_rank is the number of a group.)
  std::vector<int> global_ranks() const;
  int global_rank(int group_rank) const;
  int group_rank(int global_rank) const;

  /// Makes a group of some of this group's ranks. Collective over this group: every rank calls it, member or not, with
  /// the same arguments. The ranks are this group's and are put in order; in the new group they count from 0.
  ProcessGroup new_group(std::vector<int> ranks, const NewGroupOptions& options = {}) const;
  /// Makes consecutive groups of one size, which must divide size(), and returns the one this rank is in: see
  /// GroupLayout. Collective over this group.
  ProcessGroup new_subgroups(int group_size, const NewGroupOptions& options = {}) const;
  /// Makes the groups that are listed, of which each rank is in one at most, and returns the one this rank is in, or
  /// one that does not contain it. Collective over this group.
  ProcessGroup new_subgroups_by_enumeration(const std::vector<std::vector<int>>& groups,
                                            const NewGroupOptions& options = {}) const;

  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  [[nodiscard]] Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                                      const CallOptions& options = {}) const;

  /// Only rank `dst` gets the result; the tensors of the others stay as they were.
  void reduce(const at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;
  [[nodiscard]] Work reduce_async(const at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::kSum,
                                  const CallOptions& options = {}) const;

  void broadcast(const at::Tensor& tensor, int src, const CallOptions& options = {}) const;
  [[nodiscard]] Work broadcast_async(const at::Tensor& tensor, int src, const CallOptions& options = {}) const;

  /// `output` has size() times the elements of `input` and becomes the inputs of all ranks, in order of rank.
  void all_gather(const at::Tensor& output, const at::Tensor& input, const CallOptions& options = {}) const;
  [[nodiscard]] Work all_gather_async(const at::Tensor& output, const at::Tensor& input,
                                      const CallOptions& options = {}) const;
  /// outputs[r] becomes rank r's input; here inputs may differ in size between ranks.
  void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                  const CallOptions& options = {}) const;
  [[nodiscard]] Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                                      const CallOptions& options = {}) const;

  /// On rank `dst`, outputs[r] becomes rank r's input; the other ranks give no outputs. Inputs may differ in size.
  void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst,
              const CallOptions& options = {}) const;
  [[nodiscard]] Work gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst,
                                  const CallOptions& options = {}) const;

  /// Rank r's output becomes inputs[r] of rank `src`; the other ranks give no inputs. Parts may differ in size.
  void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
               const CallOptions& options = {}) const;
  [[nodiscard]] Work scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src,
                                   const CallOptions& options = {}) const;

  /// `input` has size() times the elements of `output`; the parts are reduced, and rank r gets part r.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum,
                      const CallOptions& options = {}) const;
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                          ReduceOp op = ReduceOp::kSum, const CallOptions& options = {}) const;

  /// inputs[r] goes to rank r, outputs[r] comes from it. Parts may differ in size.
  void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                  const CallOptions& options = {}) const;
  [[nodiscard]] Work all_to_all_async(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                                      const CallOptions& options = {}) const;

  /// Point to point, independent of the collectives. Messages of one tag between two ranks arrive in order. A rank
  /// cannot send to itself.
  void send(const at::Tensor& tensor, int dst, uint32_t tag = 0, const CallOptions& options = {}) const;
  [[nodiscard]] Work send_async(const at::Tensor& tensor, int dst, uint32_t tag = 0,
                                const CallOptions& options = {}) const;
  void recv(const at::Tensor& tensor, int src, uint32_t tag = 0, const CallOptions& options = {}) const;
  [[nodiscard]] Work recv_async(const at::Tensor& tensor, int src, uint32_t tag = 0,
                                const CallOptions& options = {}) const;

  /// Returns when the calls of this rank are done, on a GPU too; throws when one of them failed.
  void synchronize() const;

  /// Returns when every rank has called it.
  void barrier(const CallOptions& options = {}) const;
  [[nodiscard]] Work barrier_async(const CallOptions& options = {}) const;

  /// Returns when every rank has called it, or throws TimeoutError naming every rank that has not. It does not go
  /// through the backend: it works where that hangs, takes longer, and leaves the group usable.
  void monitored_barrier(const CallOptions& options = {}) const;

  /// Objects: strings, numbers, tensors on the CPU, and lists, tuples and dictionaries of them. Collective; what
  /// broadcast and scatter are given on ranks other than `src` is not looked at. Tensors are copied.
  c10::IValue broadcast_object(const c10::IValue& object, int src, const CallOptions& options = {}) const;
  std::vector<c10::IValue> all_gather_object(const c10::IValue& object, const CallOptions& options = {}) const;
  /// Empty on ranks other than `dst`.
  std::vector<c10::IValue> gather_object(const c10::IValue& object, int dst, const CallOptions& options = {}) const;
  /// `objects` has one for each rank, on rank `src`.
  c10::IValue scatter_object(const std::vector<c10::IValue>& objects, int src, const CallOptions& options = {}) const;

  /// A tensor in memory that the backend reduces without copying. Not collective; contents undefined.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Not collective: waits for the calls of this rank that are pending and leaves the group. Later calls throw
  /// UsageError; ranks that still need this one get PeerError. The group also ends with its last handle.
  void destroy() const;

  /// Not collective: gives the group up. Every call that waits on this rank and all later ones throw PeerError with the
  /// reason, on all ranks.
  void abort(const std::string& reason) const;

  /// The groups themselves are equal, not just alike.
  friend bool operator==(const ProcessGroup&, const ProcessGroup&) = default;

 private:
  friend void detail::run_captured(const ProcessGroup&, const std::function<void()>&, const CallOptions&);
  detail::Group& member() const;

  std::shared_ptr<detail::Group> group_;  // constant after construction
};

struct ProcessGroupOptions {
  /// "auto", one of available_backends(), or one for each device: "cpu:gloo,cuda:nccl". With "auto" the best there is:
  /// shared memory, or Gloo between hosts, for CPU tensors, and NCCL for CUDA tensors.
  std::string backend = "auto";
  /// Where the ranks meet: "tcp://host:port", at which rank 0 listens; "file:///path", a file that does not exist yet,
  /// in a folder that only this user can write and that all ranks see; or "env://", which takes it from MASTER_ADDR and
  /// MASTER_PORT or from what else the launcher has left (docs/environment.md). One rank alone needs to meet nobody.
  std::string init_method = "env://";
  /// From the environment when not given: see Environment.
  std::optional<int> rank{};
  std::optional<int> world_size{};
  /// For joining, and for each call of the group.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Where this rank's tensors live: its GPU, by its local rank, when there is one for each rank of this host and the
  /// backend takes them, else the CPU.
  std::optional<c10::Device> device{};
  /// Meet in this store and not by init_method.
  std::shared_ptr<Store> store{};
  /// A rank that is silent for so long counts as gone: its process is stopped, or its host or network is. One whose
  /// process ends is noticed at once. A process in a debugger may be silent.
  std::chrono::milliseconds heartbeat_limit = std::chrono::seconds(5);
};

/// Joins the job and returns the group of all its ranks. Collective: returns when all ranks are there, or throws
/// TimeoutError naming those that are not, PeerError naming one that died meanwhile, MismatchError when two ranks
/// disagree about the job (both named), UsageError when the environment or an option makes no sense.
///
/// Rank 0's process, or the launcher, hosts the store that the ranks share: let it end last.
///
/// A process may destroy its group and join again, equally often on all ranks, where the ranks meet at a port (env://,
/// tcp://). A file or a store of yours is good for one join.
LOCKSTEP_EXPORT ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

}  // namespace lockstep
