#include "doctor/variables.h"

#include <algorithm>
#include <cctype>
#include <cstring>

extern char** environ;

namespace lockstep::tool {
namespace {

bool is_telling(const std::string& name) {
  for (const char* prefix : {"LOCKSTEP_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_",
                             "NCCL_", "OMP_", "CUDA_VISIBLE_DEVICES"})
    if (name.starts_with(prefix)) return true;
  for (const char* exact :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ROLE_RANK",
        "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR"})
    if (name == exact) return true;
  return false;
}

bool is_secret(std::string name) {
  if (name == "LOCKSTEP_SECRET_FILE") return false;  // a path
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  for (const char* part : {"SECRET", "TOKEN", "KEY", "PASSWORD", "PASSWD", "CREDENTIAL", "JWT"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

}  // namespace

Variables process_variables() {
  Variables variables;
  for (char** entry = environ; entry && *entry; ++entry)
    if (char* equals = std::strchr(*entry, '=')) variables[std::string(*entry, equals)] = equals + 1;
  return variables;
}

Variables telling_variables(const Variables& all) {
  Variables telling;
  for (const auto& [name, value] : all)
    if (is_telling(name)) telling[name] = is_secret(name) ? "(hidden)" : value;
  return telling;
}

Variables nccl_variables(const Variables& all) {
  Variables nccl = telling_variables(all);
  std::erase_if(nccl, [](const auto& variable) { return !variable.first.starts_with("NCCL_"); });
  return nccl;
}

}  // namespace lockstep::tool
