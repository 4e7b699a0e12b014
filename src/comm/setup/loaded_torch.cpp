// The LibTorch that this process has loaded.
//
// A program that loads a different LibTorch than lockstep was compiled with is ended at once. The classes of that
// LibTorch have a different layout, so the program would crash in a later call without a clear error.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include <torch/version.h>

// A function of LibTorch that not all versions declare in a header. Weak: a LibTorch without it is not checked.
namespace caffe2 {
__attribute__((weak)) const std::map<std::string, std::string>& GetBuildOptions();
}

namespace lockstep {
namespace {

constexpr int kWrongConfiguration = 78;  // EX_CONFIG of sysexits.h

/// "2.11" of "2.11.0".
std::string release_of(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

std::string file_of_torch() {
  Dl_info owner{};
  return ::dladdr(reinterpret_cast<void*>(&caffe2::GetBuildOptions), &owner) != 0 ? owner.dli_fname : "an unknown file";
}

// Runs before all other code of this library, which may use LibTorch's classes in static initializers.
__attribute__((constructor(101))) void check_loaded_torch() {
  if (!caffe2::GetBuildOptions) return;
  const auto& options = caffe2::GetBuildOptions();
  const auto loaded = options.find("TORCH_VERSION");
  const std::string built = TORCH_VERSION;
  if (loaded == options.end() || release_of(loaded->second) == release_of(built)) return;
  std::fprintf(stderr,
               "lockstep: built with LibTorch %s, but this program loaded LibTorch %s from %s. Build lockstep and the "
               "program with the LibTorch that they load, or make them load %s. LD_LIBRARY_PATH or an upgrade of "
               "PyTorch's wheel may have changed which LibTorch is loaded.\n",
               built.c_str(), loaded->second.c_str(), file_of_torch().c_str(), built.c_str());
  std::_Exit(kWrongConfiguration);
}

}  // namespace

}  // namespace lockstep
