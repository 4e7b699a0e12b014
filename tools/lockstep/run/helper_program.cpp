#include "run/helper_program.h"

namespace lockstep::tool {

namespace fs = std::filesystem;

fs::path find_helper_program(const std::string& name) {
  std::error_code error;
  const fs::path here = fs::read_symlink("/proc/self/exe", error).parent_path();
  for (const fs::path& place : {here / name, here / "../libexec/lockstep" / name})
    if (fs::exists(place, error)) return place.lexically_normal();
  return {};
}

}  // namespace lockstep::tool
