#include "comm/shared_memory_calls.h"

#include <utility>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/argument_checks.h"
#include "comm/dense.h"
#include "comm/group/group.h"

namespace lockstep::detail {
namespace {

Group& sharing_group(const ProcessGroup& group) {
  if (!shares_memory(group))
    throw UsageError(group.rank(), text("the ranks of group ", group.name(), ", with backend ", group.backend_name(),
                                        ", do not share memory; use 'shm' or 'threads'"));
  return group_of(group)->for_control();
}

}  // namespace

bool shares_memory(const ProcessGroup& group) {
  return group.supports(c10::kCPU) && group_of(group)->for_control().backend()->shares_memory();
}

at::Tensor allocate_shared(const ProcessGroup& group, int64_t elements, at::ScalarType dtype,
                           const CallOptions& options) {
  at::Tensor memory;
  sharing_group(group).run({{Operation::kAllocateShared, dtype, elements},
                            [&](Backend& backend, const CallInfo& call) {
                              const auto width = static_cast<int64_t>(c10::elementSize(dtype));
                              memory = backend.allocate_shared(elements * width, call);
                            }},
                           options);
  if (!memory.defined())
    throw SystemError(text("rank ", group.rank(), ": no room for ", elements, " elements of ", c10::toString(dtype),
                           " in shared memory; use fewer, free memory of the machine, or raise LOCKSTEP_SHM_BYTES"));
  return memory.view(dtype);
}

Work reduce_ranges_async(const ProcessGroup& group, const at::Tensor& tensor, ReduceOp op,
                         std::vector<Backend::Range> ranges, Backend::Consume consume, const CallOptions& options,
                         std::string detail) {
  auto& sharing = sharing_group(group);
  Checker check(sharing.membership(), Operation::kReduceRanges);
  check.readable(tensor, "the tensor");
  check.reducible(tensor, op);
  return sharing.submit(
      {{Operation::kReduceRanges, tensor.scalar_type(), tensor.numel(), op, {}, std::move(detail)},
       [tensor, op, ranges = std::move(ranges), consume = std::move(consume)](Backend& backend, const CallInfo& call) {
         if (tensor.numel() > 0)
           backend.reduce_ranges(tensor, op, ranges, consume, call);
         else
           agree_only(backend, call);
       }},
      options);
}

}  // namespace lockstep::detail
