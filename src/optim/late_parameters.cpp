#include "optim/late_parameters.h"

#include <exception>
#include <memory>
#include <vector>

#include <ATen/record_function.h>

namespace lockstep::detail {
namespace {

struct Late {
  at::Tensor memory;
  Work arrival;

  /// Also if it has failed, or is waited for in a forked process, where it cannot arrive.
  bool is_over() const {
    try {
      return arrival.is_done();
    } catch (const std::exception&) {
      return true;
    }
  }
};

/// Memory for which the operators of this thread wait. While there is any, LibTorch calls before_operator() with the
/// inputs of each operator.
thread_local std::vector<Late> late;

void wait_for(const at::Tensor& input) {
  if (!input.defined() || !input.has_storage()) return;
  for (const auto& item : late) {
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

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call);

/// The callback of this thread, or 0. Autograd restores a thread's callbacks after each node of a graph, also those
/// that were removed inside of it, so only LibTorch knows whether there is one.
at::CallbackHandle installed_callback() {
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_)
    if (entry.callback_.start() == &before_operator) return entry.handle_;
  return 0;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& call) {
  for (const auto& input : call.inputs()) wait_for_tensors_in(input);
  // Those for which only a stream of the GPU waits stay: operators on other streams have to wait as well.
  std::erase_if(late, [](const Late& item) { return item.is_over(); });
  if (!late.empty()) return nullptr;
  if (const auto handle = installed_callback(); handle != 0) at::removeCallback(handle);
  return nullptr;
}

}  // namespace

void wait_on_first_use(const at::Tensor& memory, const Work& arrival) {
  late.push_back({memory, arrival});
  if (installed_callback() == 0)
    at::addThreadLocalCallback(
        at::RecordFunctionCallback(&before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace lockstep::detail
