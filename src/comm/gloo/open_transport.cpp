#include <dlfcn.h>

#include <filesystem>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/gloo/transport.h"

namespace lockstep::gloo_backend {
namespace {

using Open = Transport*(const TransportOptions&);

/// Whether this program contains a Gloo other than the installed one: that of PyTorch's wheel. Debian's LibTorch uses
/// the installed one.
bool has_another_gloo() {
  void* symbol = ::dlsym(RTLD_DEFAULT, "_ZTVN4gloo7ContextE");  // the vtable of gloo::Context
  Dl_info owner{};
  if (!symbol || ::dladdr(symbol, &owner) == 0) return false;
  return !std::filesystem::path(owner.dli_fname).filename().string().starts_with("libgloo.");
}

Open* load_module() {
  // Deep binding: the module and the Gloo that it is linked to look for symbols in each other before LibTorch.
  const int binding = has_another_gloo() ? RTLD_DEEPBIND : 0;
  void* module = ::dlopen(LOCKSTEP_GLOO_MODULE, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | binding);
  if (!module)
    throw SystemError(text("the backend gloo is in " LOCKSTEP_GLOO_MODULE ", which cannot be loaded: ", ::dlerror(),
                           ". Install it beside liblockstep, and Gloo itself with: apt-get install libgloo0"));
  return reinterpret_cast<Open*>(::dlsym(module, "lockstep_open_gloo"));
}

}  // namespace

std::unique_ptr<Transport> open_transport(const TransportOptions& options) {
  static Open* const open = load_module();
  return std::unique_ptr<Transport>(open(options));
}

}  // namespace lockstep::gloo_backend
