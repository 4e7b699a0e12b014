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
    throw UsageError(group.rank(), text("the ranks of group ", group.name(), ", with ", describe_backend(group),
                                        ", do not share memory; use 'shm' or 'threads'"));
  return group_of(group)->for_control();
}

Group::Call reduce_ranges_call(const Membership& me, RangeReduction reduction) {
  const auto& tensor = reduction.tensor;
  Checker check(me, Operation::kReduceRanges);
  check.readable(tensor, "the tensor");
  check.reducible(tensor, reduction.op);
  Fingerprint fingerprint{Operation::kReduceRanges,   tensor.scalar_type(), tensor.numel(), reduction.op, {},
                          std::move(reduction.detail)};
  return {std::move(fingerprint), [reduction = std::move(reduction)](Backend& backend, const CallInfo& call) {
            const auto& [tensor, op, ranges, consume, detail] = reduction;
            if (tensor.numel() > 0)
              backend.reduce_ranges(tensor, op, ranges, consume, call);
            else
              barrier_without_data(backend, call);
          }};
}

}  // namespace

bool shares_memory(const ProcessGroup& group) {
  return group.supports(c10::kCPU) && group_of(group)->for_control().backend()->shares_memory();
}

std::string describe_backend(const ProcessGroup& group) {
  const auto& why = group_of(group)->for_control().membership().why_not_shm;
  return text("backend ", group.backend_name(), why.empty() ? "" : text(", because shm cannot be used (", why, ")"));
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

void reduce_ranges(const ProcessGroup& group, RangeReduction reduction, const CallOptions& options) {
  auto& sharing = sharing_group(group);
  sharing.run(reduce_ranges_call(sharing.membership(), std::move(reduction)), options);
}

Work reduce_ranges_async(const ProcessGroup& group, RangeReduction reduction, const CallOptions& options) {
  auto& sharing = sharing_group(group);
  return sharing.submit(reduce_ranges_call(sharing.membership(), std::move(reduction)), options);
}

}  // namespace lockstep::detail
