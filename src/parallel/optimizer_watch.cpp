#include "parallel/optimizer_watch.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>

#include <c10/core/GradMode.h>

namespace lockstep::detail {
namespace {

thread_local OptimizerWatch* current_watch = nullptr;

std::string symbol_at(const void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_sname == nullptr) return "";
  const std::unique_ptr<char, decltype(&std::free)> name(abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr),
                                                         &std::free);
  return name ? name.get() : "";
}

// Returns "torch::optim::Adam" for "torch::optim::Adam::step(std::function<at::Tensor ()>)".
std::string optimizer_of(std::string_view function) {
  constexpr std::string_view kSpace = "torch::optim::", kStep = "::step(";
  const auto end = function.find(kStep);
  if (!function.starts_with(kSpace) || end == function.npos) return "";
  return std::string(function.substr(0, end));
}

// LibTorch does not report which optimizer makes a step, but its functions are on the stack.
std::string optimizer_on_stack() {
  std::array<void*, 64> addresses{};
  const int depth = backtrace(addresses.data(), static_cast<int>(addresses.size()));
  for (int i = 0; i < depth; ++i)
    if (auto optimizer = optimizer_of(symbol_at(addresses[static_cast<size_t>(i)])); !optimizer.empty())
      return optimizer;
  return "";
}

}  // namespace

OptimizerWatch::OptimizerWatch()
    : outer_(std::exchange(current_watch, this)),
      callback_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(&OptimizerWatch::on_operation).scopes({at::RecordScope::FUNCTION}))) {}

OptimizerWatch::~OptimizerWatch() {
  at::removeCallback(callback_);
  current_watch = outer_;
}

// Optimizers work without autograd; most other operations of a step do not.
std::unique_ptr<at::ObserverContext> OptimizerWatch::on_operation(const at::RecordFunction& /*operation*/) {
  if (current_watch && current_watch->found_.empty() && !c10::GradMode::is_enabled())
    current_watch->found_ = optimizer_on_stack();
  return nullptr;
}

}  // namespace lockstep::detail
