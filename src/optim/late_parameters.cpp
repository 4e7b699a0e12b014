#include "optim/late_parameters.h"

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/record_function.h>

namespace lockstep::detail {
namespace {

struct Late {
  at::Tensor memory;
  Work arrival;
};

/// Memory for which the operators of this thread wait. While there is any, LibTorch calls before_operator() with the
/// inputs of each operator.
struct Watch {
  std::vector<Late> late{};
  at::CallbackHandle handle = 0;  // 0: LibTorch does not call
};

thread_local Watch watch;

void wait_for(const at::Tensor& input) {
  if (!input.defined() || !input.has_storage()) return;
  for (const auto& item : watch.late) {
    if (!item.memory.is_alias_of(input)) continue;
    try {
      item.arrival.wait();
    } catch (const std::exception&) {  // whoever waits for the call itself sees it as well
    }
  }
}

void wait_for_tensors_in(const c10::IValue& value) {
  if (value.isTensor()) {
    wait_for(value.toTensor());
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) wait_for_tensors_in(item);
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  for (const auto& input : call.inputs()) wait_for_tensors_in(input);
  // Those for which only a stream of the GPU waits stay: operators on other streams have to wait as well.
  std::erase_if(watch.late, [](const Late& item) { return item.arrival.is_done(); });
  if (watch.late.empty() && watch.handle != 0) at::removeCallback(std::exchange(watch.handle, 0));
  return nullptr;
}

}  // namespace

void wait_on_first_use(const at::Tensor& memory, const Work& arrival) {
  watch.late.push_back({memory, arrival});
  if (watch.handle == 0)
    watch.handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace lockstep::detail
