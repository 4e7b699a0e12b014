#include "comm/collectives.h"

#include "comm/argument_checks.h"
#include "comm/dense.h"

namespace lockstep::detail {
namespace {

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

}  // namespace

Group::Call all_reduce_call(const Membership& me, const at::Tensor& tensor, ReduceOp op) {
  Checker check(me, Operation::kAllReduce);
  check.writable(tensor, "the tensor");
  check.reducible(tensor, op);
  bump_version(tensor);
  Fingerprint fingerprint{Operation::kAllReduce, tensor.scalar_type(), tensor.numel(), op};
  return {std::move(fingerprint), [&tensor, op](Backend& backend, const CallInfo& call) {
            auto dense = dense_input(tensor);
            dense->defined() ? backend.all_reduce(*dense, op, call) : barrier_without_data(backend, call);
            store(tensor, *dense);
          }};
}

Group::Call reduce_call(const Membership& me, const at::Tensor& tensor, int root, ReduceOp op) {
  Checker check(me, Operation::kReduce);
  check.writable(tensor, "the tensor");
  check.reducible(tensor, op);
  check.rank_in_group(root, "dst");
  if (me.rank == root) bump_version(tensor);
  Fingerprint fingerprint{Operation::kReduce, tensor.scalar_type(), tensor.numel(), op, root};
  return {std::move(fingerprint),
          [&tensor, op, root, is_root = me.rank == root](Backend& backend, const CallInfo& call) {
            auto dense = dense_input(tensor);
            dense->defined() ? backend.reduce(*dense, op, root, call) : barrier_without_data(backend, call);
            if (is_root) store(tensor, *dense);
          }};
}

Group::Call broadcast_call(const Membership& me, const at::Tensor& tensor, int root) {
  Checker check(me, Operation::kBroadcast);
  check.rank_in_group(root, "src");
  bool is_root = me.rank == root;
  is_root ? check.readable(tensor, "the tensor") : check.writable(tensor, "the tensor");
  if (!is_root) bump_version(tensor);
  Fingerprint fingerprint{Operation::kBroadcast, tensor.scalar_type(), tensor.numel(), {}, root};
  return {std::move(fingerprint), [&tensor, root, is_root](Backend& backend, const CallInfo& call) {
            auto dense = is_root ? dense_input(tensor) : dense_output(tensor);
            dense->defined() ? backend.broadcast(*dense, root, call) : barrier_without_data(backend, call);
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
  bump_version(output);
  Fingerprint fingerprint{Operation::kAllGather, input.scalar_type(), input.numel()};
  return {std::move(fingerprint), [&output, &input](Backend& backend, const CallInfo& call) {
            auto to = dense_output(output);
            to->defined() ? backend.all_gather(*to, *dense_input(input), call) : barrier_without_data(backend, call);
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
  bump_versions(outputs);
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
  bump_versions(outputs);
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
  bump_version(output);
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
  bump_version(output);
  Fingerprint fingerprint{Operation::kReduceScatter, input.scalar_type(), input.numel(), op};
  return {std::move(fingerprint), [&output, &input, op](Backend& backend, const CallInfo& call) {
            auto to = dense_output(output);
            to->defined() ? backend.reduce_scatter(*to, *dense_input(input), op, call)
                          : barrier_without_data(backend, call);
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
  bump_versions(outputs);
  Fingerprint fingerprint{Operation::kAllToAll, inputs[0].scalar_type(), {}, {}, {}, "",
                          elements_of(inputs),  elements_of(outputs)};
  return {std::move(fingerprint), [&outputs, &inputs](Backend& backend, const CallInfo& call) {
            auto to = dense_outputs(outputs);
            backend.all_to_all_v(to, dense_inputs(inputs), call);
            store(outputs, to);
          }};
}

Group::Call reduce_scatter_list_call(const Membership& me, const at::Tensor& output,
                                     const std::vector<at::Tensor>& inputs, ReduceOp op) {
  Checker check(me, Operation::kReduceScatter);
  check.one_for_each_rank(inputs, "the list of inputs");
  check.writable(output, "the output");
  check.reducible(output, op);
  for (const auto& input : inputs) {
    check.readable(input, "an input");
    check.same_dtype(output, input);
  }
  check_own_part(check, output, inputs[me.rank]);
  for (int r = 0; r < me.size; ++r)
    if (r != me.rank || !inputs[r].is_same(output)) check.no_overlap(output, inputs[r]);
  bump_version(output);
  Fingerprint fingerprint{Operation::kReduceScatter,
                          output.scalar_type(),
                          {},
                          op,
                          {},
                          "",
                          elements_of(inputs),
                          std::vector<int64_t>(me.size, output.numel())};
  return {std::move(fingerprint), [&output, &inputs, op](Backend& backend, const CallInfo& call) {
            auto to = dense_output(output);
            backend.reduce_scatter_v(*to, dense_inputs(inputs), op, call);
            store(output, *to);
          }};
}

namespace {

// Cuts a tensor into the rows for each rank, or from each rank.
std::vector<at::Tensor> rows_of(const Checker& check, const Membership& me, const at::Tensor& tensor,
                                const std::vector<int64_t>& rows, const char* role) {
  if (tensor.dim() == 0) check.fail(role, " has no dimensions; it is divided along its first one");
  auto each = rows;
  if (each.empty()) {
    if (tensor.size(0) % me.size != 0)
      check.fail(role, " has ", tensor.size(0), " rows, which ", me.size, " ranks cannot share equally; pass splits");
    each.assign(me.size, tensor.size(0) / me.size);
  }
  if (static_cast<int>(each.size()) != me.size)
    check.fail("the splits of ", role, " have ", each.size(), " numbers; give ", me.size, ", one for each rank");
  int64_t sum = 0;
  for (int64_t count : each) {
    if (count < 0) check.fail("the splits of ", role, " contain ", count, "; they must not be negative");
    sum += count;
  }
  if (sum != tensor.size(0))
    check.fail("the splits of ", role, " add up to ", sum, ", but it has ", tensor.size(0), " rows");
  return tensor.detach().split_with_sizes(each);
}

}  // namespace

Group::Call all_to_all_rows_call(const Membership& me, const at::Tensor& output, const at::Tensor& input,
                                 const Splits& splits) {
  Checker check(me, Operation::kAllToAll);
  check.writable(output, "the output");
  check.readable(input, "the input");
  check.same_dtype(output, input);
  check.no_overlap(output, input);
  auto outputs = rows_of(check, me, output, splits.output, "the output");
  auto inputs = rows_of(check, me, input, splits.input, "the input");
  check_own_part(check, outputs[me.rank], inputs[me.rank]);
  bump_version(output);
  Fingerprint fingerprint{Operation::kAllToAll, input.scalar_type(), {}, {}, {}, "",
                          elements_of(inputs),  elements_of(outputs)};
  return {std::move(fingerprint),
          [outputs = std::move(outputs), inputs = std::move(inputs)](Backend& backend, const CallInfo& call) {
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
