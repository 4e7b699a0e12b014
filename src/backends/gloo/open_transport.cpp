#include <dlfcn.h>

#include <lockstep/error.h>

#include "backends/gloo/transport.h"
#include "base/text.h"

namespace lockstep::gloo_backend {
namespace {

using Open = Transport*(int rank, int size);

// RTLD_DEEPBIND: the module and the Gloo library that it links resolve symbols in each other before LibTorch, so that
// they never call the Gloo inside LibTorch. Sanitizers do not support the flag. Debian's LibTorch does not need it,
// because it uses the installed Gloo.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kDeepBinding = 0;
#else
constexpr int kDeepBinding = RTLD_DEEPBIND;
#endif

Open* load_module() {
  void* module = ::dlopen(LOCKSTEP_GLOO_MODULE, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | kDeepBinding);
  if (!module)
    throw SystemError(text("backend 'gloo' cannot load its module " LOCKSTEP_GLOO_MODULE ": ", ::dlerror(),
                           ". Install the module beside liblockstep, and Gloo with: apt-get install libgloo0"));
  return reinterpret_cast<Open*>(::dlsym(module, "lockstep_open_gloo"));
}

}  // namespace

std::unique_ptr<Transport> open_transport(int rank, int size) {
  static Open* const open = load_module();
  return std::unique_ptr<Transport>(open(rank, size));
}

}  // namespace lockstep::gloo_backend
