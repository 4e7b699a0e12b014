#pragma once

#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <lockstep/backend.h>
#include <lockstep/error.h>

#include "backends/common/reduction.h"
#include "base/text.h"
#include "comm/group/membership.h"
#include "comm/watch/fingerprint.h"

namespace lockstep::detail {

/// Elements are moved as bytes, so any dtype of plain values can be sent.
inline bool is_movable(c10::ScalarType dtype) {
  return dtype != c10::ScalarType::Undefined && !c10::isQIntType(dtype);
}

inline const char* remedy_for(ReduceOp op, c10::ScalarType dtype) {
  if (c10::isComplexType(dtype)) return "; reduce at::view_as_real(tensor) if the operation applies to each part";
  if (!has_reductions(dtype)) return "; convert the tensor to a dtype that docs/collectives.md lists for reductions";
  return op == ReduceOp::kAvg ? "; use sum, or a floating-point tensor" : "; use an integer or bool tensor";
}

/// Checks the arguments of one call. Every message begins with the rank and the call.
class Checker {
 public:
  Checker(const Membership& me, Operation call) : me_(me), call_(call) {}

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw UsageError(me_.rank, text(name_of(call_), ": ", parts...));
  }

  void readable(const at::Tensor& tensor, const char* role) const {
    if (!tensor.defined()) fail(role, " is an undefined tensor; pass a tensor with data");
    if (tensor.layout() != c10::kStrided) fail(role, " is ", tensor.layout(), "; only dense tensors can be sent");
    if (tensor.device() != me_.device)
      fail(role, " is on ", tensor.device(), ", but this group's backend '", me_.backend_name, "' supports tensors on ",
           me_.device, "; call .to(world.device())");
    if (!is_movable(tensor.scalar_type()))
      fail(role, " is ", tensor.scalar_type(), "; docs/collectives.md lists the dtypes that can be sent");
  }

  void writable(const at::Tensor& tensor, const char* role) const {
    readable(tensor, role);
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      fail(role, " has elements that share memory (an expanded tensor?); call .contiguous() first");
  }

  void reducible(const at::Tensor& tensor, ReduceOp op) const {
    if (!is_reducible(op, tensor.scalar_type()))
      fail("operation ", name_of(op), " is not defined for ", tensor.scalar_type(),
           remedy_for(op, tensor.scalar_type()));
  }

  void same_dtype(const at::Tensor& a, const at::Tensor& b) const {
    if (a.scalar_type() != b.scalar_type())
      fail("the output is ", a.scalar_type(), " and the input ", b.scalar_type(), "; they must be the same");
  }

  // The tensors must not overlap, because other ranks read this rank's input while it writes its output.
  void no_overlap(const at::Tensor& output, const at::Tensor& input) const {
    auto status = at::get_overlap_status(output.unsafeGetTensorImpl(), input.unsafeGetTensorImpl());
    if (status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial)
      fail("an output and an input share memory; use separate tensors");
  }

  // Allows this rank's part to be exactly its own range of the whole (in place).
  void no_overlap_or_in_place(const at::Tensor& whole, const at::Tensor& part) const {
    auto* place = static_cast<char*>(whole.data_ptr()) + me_.rank * part.nbytes();
    if (whole.is_contiguous() && part.is_contiguous() && part.data_ptr() == place) return;
    no_overlap(whole, part);
  }

  void rank_in_group(int rank, const char* role) const {
    if (rank < 0 || rank >= me_.size) fail(role, " is rank ", rank, "; this group has ranks 0 to ", me_.size - 1);
  }

  void one_for_each_rank(const std::vector<at::Tensor>& tensors, const char* role) const {
    if (static_cast<int>(tensors.size()) != me_.size)
      fail(role, " has ", tensors.size(), " tensors; give ", me_.size, ", one for each rank");
  }

  void none(const std::vector<at::Tensor>& tensors, const char* role, int root) const {
    if (!tensors.empty())
      fail(role, " has ", tensors.size(), " tensors; only rank ", root, " passes them in this call");
  }

  void parts_of(const at::Tensor& whole, const char* whole_role, const at::Tensor& part, const char* part_role) const {
    if (whole.numel() != part.numel() * me_.size)
      fail(whole_role, " has ", whole.numel(), " elements and ", part_role, " ", part.numel(), "; it must have ",
           me_.size, " times as many, ", part.numel() * me_.size);
  }

 private:
  const Membership& me_;
  const Operation call_;
};

// A call on tensors without elements moves no data, but ranks that make different calls must get an error.
inline void barrier_without_data(Backend& backend, const CallInfo& call) {
  if (!backend.is_queueing()) backend.barrier(call);
}

}  // namespace lockstep::detail
