#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/backend.h>
#include <lockstep/export.h>
#include <lockstep/reduce_op.h>
#include <lockstep/store.h>
#include <lockstep/work.h>

namespace lockstep {

namespace detail {
class Group;
}

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
/// Errors: UsageError before anything is sent, and the group goes on. Any other error breaks the group: every later
/// call throws it again.
class LOCKSTEP_EXPORT ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<detail::Group> group);

  int rank() const;
  int size() const;
  int local_rank() const;  // among the ranks of this host
  c10::Device device() const;
  const std::string& backend_name() const;
  std::chrono::milliseconds timeout() const;

  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;
  [[nodiscard]] Work all_reduce_async(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum) const;

  /// Only rank `dst` gets the result; the tensors of the others stay as they were.
  void reduce(const at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::kSum) const;
  [[nodiscard]] Work reduce_async(const at::Tensor& tensor, int dst, ReduceOp op = ReduceOp::kSum) const;

  void broadcast(const at::Tensor& tensor, int src) const;
  [[nodiscard]] Work broadcast_async(const at::Tensor& tensor, int src) const;

  /// `output` has size() times the elements of `input` and becomes the inputs of all ranks, in order of rank.
  void all_gather(const at::Tensor& output, const at::Tensor& input) const;
  [[nodiscard]] Work all_gather_async(const at::Tensor& output, const at::Tensor& input) const;
  /// outputs[r] becomes rank r's input; here inputs may differ in size between ranks.
  void all_gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) const;
  [[nodiscard]] Work all_gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input) const;

  /// On rank `dst`, outputs[r] becomes rank r's input; the other ranks give no outputs. Inputs may differ in size.
  void gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst) const;
  [[nodiscard]] Work gather_async(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst) const;

  /// Rank r's output becomes inputs[r] of rank `src`; the other ranks give no inputs. Parts may differ in size.
  void scatter(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src) const;
  [[nodiscard]] Work scatter_async(const at::Tensor& output, const std::vector<at::Tensor>& inputs, int src) const;

  /// `input` has size() times the elements of `output`; the parts are reduced, and rank r gets part r.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op = ReduceOp::kSum) const;
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                          ReduceOp op = ReduceOp::kSum) const;

  /// inputs[r] goes to rank r, outputs[r] comes from it. Parts may differ in size.
  void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) const;
  [[nodiscard]] Work all_to_all_async(const std::vector<at::Tensor>& outputs,
                                      const std::vector<at::Tensor>& inputs) const;

  /// Point to point, independent of the collectives. Messages of one tag between two ranks arrive in order. A rank
  /// cannot send to itself.
  void send(const at::Tensor& tensor, int dst, uint32_t tag = 0) const;
  [[nodiscard]] Work send_async(const at::Tensor& tensor, int dst, uint32_t tag = 0) const;
  void recv(const at::Tensor& tensor, int src, uint32_t tag = 0) const;
  [[nodiscard]] Work recv_async(const at::Tensor& tensor, int src, uint32_t tag = 0) const;

  /// Returns when every rank has called it.
  void barrier() const;
  [[nodiscard]] Work barrier_async() const;

  /// A tensor in memory that the backend reduces without copying. Not collective; contents undefined.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Not collective: gives the group up. Every call that waits on this rank and all later ones throw PeerError with the
  /// reason; the other ranks find this one gone.
  void abort(const std::string& reason) const;

  /// The groups themselves are equal, not just alike.
  friend bool operator==(const ProcessGroup&, const ProcessGroup&) = default;

 private:
  std::shared_ptr<detail::Group> group_;  // constant after construction
};

struct ProcessGroupOptions {
  /// "auto", or one of available_backends().
  std::string backend = "auto";
  /// Where the ranks meet: "file:///path" (a file that does not exist yet) or "env://", which takes it from
  /// LOCKSTEP_INIT_METHOD. One rank alone needs to meet nobody.
  std::string init_method = "env://";
  /// From the environment when not given: see Environment.
  std::optional<int> rank{};
  std::optional<int> world_size{};
  /// For joining, and for each call of the group.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// Where this rank's tensors live.
  std::optional<c10::Device> device{};
  /// Meet in this store and not by init_method.
  std::shared_ptr<Store> store{};
};

/// Joins the job and returns the group of all its ranks. Collective: returns when all ranks are there, or throws
/// TimeoutError naming those that are not, MismatchError when two ranks disagree about the job, UsageError when the
/// environment or an option makes no sense.
LOCKSTEP_EXPORT ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

}  // namespace lockstep
