#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>
#include <lockstep/reduce_op.h>

#include "comm/group/group.h"

namespace lockstep::detail {

/// Each function checks the arguments of one collective and returns the call that executes it. Throws UsageError. The
/// call refers to the tensors, which must outlive it.

Group::Call all_reduce_call(const Membership& me, const at::Tensor& tensor, ReduceOp op);
Group::Call reduce_call(const Membership& me, const at::Tensor& tensor, int root, ReduceOp op);
Group::Call broadcast_call(const Membership& me, const at::Tensor& tensor, int root);
Group::Call all_gather_call(const Membership& me, const at::Tensor& output, const at::Tensor& input);
Group::Call all_gather_list_call(const Membership& me, const std::vector<at::Tensor>& outputs, const at::Tensor& input);
Group::Call gather_call(const Membership& me, const std::vector<at::Tensor>& outputs, const at::Tensor& input,
                        int root);
Group::Call scatter_call(const Membership& me, const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                         int root);
Group::Call reduce_scatter_call(const Membership& me, const at::Tensor& output, const at::Tensor& input, ReduceOp op);
Group::Call all_to_all_call(const Membership& me, const std::vector<at::Tensor>& outputs,
                            const std::vector<at::Tensor>& inputs);
Group::Call reduce_scatter_list_call(const Membership& me, const at::Tensor& output,
                                     const std::vector<at::Tensor>& inputs, ReduceOp op);
Group::Call all_to_all_rows_call(const Membership& me, const at::Tensor& output, const at::Tensor& input,
                                 const Splits& splits);
Group::Call barrier_call();

/// Checks the arguments of kSend or kRecv. Throws UsageError.
void check_message(const Membership& me, Operation call, const at::Tensor& tensor, int peer);

}  // namespace lockstep::detail
