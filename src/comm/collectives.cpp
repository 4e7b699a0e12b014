#include "comm/collectives.h"

#include <ATen/MemoryOverlap.h>

#include <lockstep/error.h>

#include "backends/common/reduction.h"
#include "base/text.h"
#include "comm/dense.h"

namespace lockstep::detail {
namespace {

/// Elements are moved as bytes, so any dtype of plain values can be sent.
bool is_movable(c10::ScalarType dtype) {
  return dtype != c10::ScalarType::Undefined && !c10::isQIntType(dtype);
}

const char* remedy_for(ReduceOp op, c10::ScalarType dtype) {
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

void check_own_part(const Checker& check, const at::Tensor& output, const at::Tensor& input) {
  if (output.numel() != input.numel())
    check.fail("this rank's own part has ", input.numel(), " elements in the input but ", output.numel(),
               " in the output; they must be equal");
}

std::vector<int64_t> elements_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> result;
  for (const auto& tensor : tensors) result.push_back(tensor.numel());
  return result;
}

std::vector<int64_t> at_rank(int rank, int size, const at::Tensor& tensor) {
  std::vector<int64_t> result(size, 0);
  result[rank] = tensor.numel();
  return result;
}

// A call on tensors without elements moves no data, but ranks that make different calls must be told.
void agree_only(Backend& backend, const CallInfo& call) {
  if (!backend.is_queueing()) backend.barrier(call);
}

}  // namespace

Group::Call all_reduce_call(const Membership& me, const at::Tensor& tensor, ReduceOp op) {
  Checker check(me, Operation::kAllReduce);
  check.writable(tensor, "the tensor");
  check.reducible(tensor, op);
  Fingerprint fingerprint{Operation::kAllReduce, tensor.scalar_type(), tensor.numel(), op};
  return {std::move(fingerprint), [&tensor, op](Backend& backend, const CallInfo& call) {
            auto dense = dense_input(tensor);
            dense->defined() ? backend.all_reduce(*dense, op, call) : agree_only(backend, call);
            store(tensor, *dense);
          }};
}

Group::Call reduce_call(const Membership& me, const at::Tensor& tensor, int root, ReduceOp op) {
  Checker check(me, Operation::kReduce);
  check.writable(tensor, "the tensor");
  check.reducible(tensor, op);
  check.rank_in_group(root, "dst");
  Fingerprint fingerprint{Operation::kReduce, tensor.scalar_type(), tensor.numel(), op, root};
  return {std::move(fingerprint),
          [&tensor, op, root, is_root = me.rank == root](Backend& backend, const CallInfo& call) {
            auto dense = dense_input(tensor);
            dense->defined() ? backend.reduce(*dense, op, root, call) : agree_only(backend, call);
            if (is_root) store(tensor, *dense);
          }};
}

Group::Call broadcast_call(const Membership& me, const at::Tensor& tensor, int root) {
  Checker check(me, Operation::kBroadcast);
  check.rank_in_group(root, "src");
  bool is_root = me.rank == root;
  is_root ? check.readable(tensor, "the tensor") : check.writable(tensor, "the tensor");
  Fingerprint fingerprint{Operation::kBroadcast, tensor.scalar_type(), tensor.numel(), {}, root};
  return {std::move(fingerprint), [&tensor, root, is_root](Backend& backend, const CallInfo& call) {
            auto dense = is_root ? dense_input(tensor) : dense_output(tensor);
            dense->defined() ? backend.broadcast(*dense, root, call) : agree_only(backend, call);
            if (!is_root) store(tensor, *dense);
          }};
}

Group::Call all_gather_call(const Membership& me, const at::Tensor& output, const at::Tensor& input) {
  Checker check(me, Operation::kAllGather);
  check.writable(output, "the output");
  check.readable(input, "the input");
  check.same_dtype(output, input);
  check.parts_of(output, "the output", input, "the input");
  check.no_overlap_or_in_place(output, input);
  Fingerprint fingerprint{Operation::kAllGather, input.scalar_type(), input.numel()};
  return {std::move(fingerprint), [&output, &input](Backend& backend, const CallInfo& call) {
            auto to = dense_output(output);
            to->defined() ? backend.all_gather(*to, *dense_input(input), call) : agree_only(backend, call);
            store(output, *to);
          }};
}

Group::Call all_gather_list_call(const Membership& me, const std::vector<at::Tensor>& outputs,
                                 const at::Tensor& input) {
  Checker check(me, Operation::kAllGather);
  check.one_for_each_rank(outputs, "the list of outputs");
  check.readable(input, "the input");
  for (const auto& output : outputs) {
    check.writable(output, "an output");
    check.same_dtype(output, input);
  }
  check_own_part(check, outputs[me.rank], input);
  for (int r = 0; r < me.size; ++r)
    if (r != me.rank || !outputs[r].is_same(input)) check.no_overlap(outputs[r], input);
  Fingerprint fingerprint{
      Operation::kAllGather, input.scalar_type(), {}, {}, {}, "", std::vector<int64_t>(me.size, input.numel()),
      elements_of(outputs)};
  return {std::move(fingerprint), [&outputs, &input, size = me.size](Backend& backend, const CallInfo& call) {
            auto to = dense_outputs(outputs);
            backend.all_to_all_v(to, std::vector<at::Tensor>(size, *dense_input(input)), call);
            store(outputs, to);
          }};
}

Group::Call gather_call(const Membership& me, const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                        int root) {
  Checker check(me, Operation::kGather);
  check.rank_in_group(root, "dst");
  check.readable(input, "the input");
  if (me.rank == root) {
    check.one_for_each_rank(outputs, "the list of outputs");
    for (const auto& output : outputs) {
      check.writable(output, "an output");
      check.same_dtype(output, input);
    }
    check_own_part(check, outputs[me.rank], input);
    for (const auto& output : outputs)
      if (!output.is_same(input)) check.no_overlap(output, input);
  } else {
    check.none(outputs, "the list of outputs", root);
  }
  Fingerprint fingerprint{Operation::kGather,  input.scalar_type(), {}, {}, root, "", at_rank(root, me.size, input),
                          elements_of(outputs)};
  return {std::move(fingerprint), [&outputs, &input, root, size = me.size](Backend& backend, const CallInfo& call) {
            std::vector<at::Tensor> to = dense_outputs(outputs);
            to.resize(size);
            std::vector<at::Tensor> from(size);
            from[root] = *dense_input(input);
            backend.all_to_all_v(to, from, call);
            store(outputs, to);
          }};
}

Group::Call scatter_call(const Membership& me, const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                         int root) {
  Checker check(me, Operation::kScatter);
  check.rank_in_group(root, "src");
  check.writable(output, "the output");
  if (me.rank == root) {
    check.one_for_each_rank(inputs, "the list of inputs");
    for (const auto& input : inputs) {
      check.readable(input, "an input");
      check.same_dtype(output, input);
    }
    check_own_part(check, output, inputs[me.rank]);
    for (const auto& input : inputs)
      if (!input.is_same(output)) check.no_overlap(output, input);
  } else {
    check.none(inputs, "the list of inputs", root);
  }
  Fingerprint fingerprint{Operation::kScatter, output.scalar_type(),          {}, {}, root, "",
                          elements_of(inputs), at_rank(root, me.size, output)};
  return {std::move(fingerprint), [&output, &inputs, root, size = me.size](Backend& backend, const CallInfo& call) {
            std::vector<at::Tensor> from = dense_inputs(inputs);
            from.resize(size);
            std::vector<at::Tensor> to(size);
            to[root] = *dense_output(output);
            backend.all_to_all_v(to, from, call);
            store(output, to[root]);
          }};
}

Group::Call reduce_scatter_call(const Membership& me, const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  Checker check(me, Operation::kReduceScatter);
  check.writable(output, "the output");
  check.readable(input, "the input");
  check.same_dtype(output, input);
  check.reducible(input, op);
  check.parts_of(input, "the input", output, "the output");
  check.no_overlap_or_in_place(input, output);
  Fingerprint fingerprint{Operation::kReduceScatter, input.scalar_type(), input.numel(), op};
  return {std::move(fingerprint), [&output, &input, op](Backend& backend, const CallInfo& call) {
            auto to = dense_output(output);
            to->defined() ? backend.reduce_scatter(*to, *dense_input(input), op, call) : agree_only(backend, call);
            store(output, *to);
          }};
}

Group::Call all_to_all_call(const Membership& me, const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs) {
  Checker check(me, Operation::kAllToAll);
  check.one_for_each_rank(outputs, "the list of outputs");
  check.one_for_each_rank(inputs, "the list of inputs");
  for (int r = 0; r < me.size; ++r) {
    check.writable(outputs[r], "an output");
    check.readable(inputs[r], "an input");
    check.same_dtype(outputs[r], inputs[r]);
  }
  check_own_part(check, outputs[me.rank], inputs[me.rank]);
  for (const auto& output : outputs)
    for (const auto& input : inputs) check.no_overlap(output, input);
  Fingerprint fingerprint{Operation::kAllToAll, inputs[0].scalar_type(), {}, {}, {}, "",
                          elements_of(inputs),  elements_of(outputs)};
  return {std::move(fingerprint), [&outputs, &inputs](Backend& backend, const CallInfo& call) {
            auto to = dense_outputs(outputs);
            backend.all_to_all_v(to, dense_inputs(inputs), call);
            store(outputs, to);
          }};
}

Group::Call barrier_call() {
  return {{Operation::kBarrier}, [](Backend& backend, const CallInfo& call) { backend.barrier(call); }};
}

void check_message(const Membership& me, Operation call, const at::Tensor& tensor, int peer) {
  Checker check(me, call);
  bool is_written = call == Operation::kRecv;
  is_written ? check.writable(tensor, "the tensor") : check.readable(tensor, "the tensor");
  check.rank_in_group(peer, is_written ? "src" : "dst");
  if (peer == me.rank) check.fail("a rank cannot send to itself; copy the tensor");
}

}  // namespace lockstep::detail
