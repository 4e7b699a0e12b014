#include "comm/setup/backend_registry.h"

#include <map>
#include <mutex>

#include <lockstep/error.h>

#include "base/text.h"
#include "backends/shm/shm_backend.h"
#include "backends/threads/threads_backend.h"
#ifdef LOCKSTEP_HAVE_GLOO
#include "backends/gloo/gloo_backend.h"
#include "backends/hierarchical/hierarchical_backend.h"
#endif
#ifdef LOCKSTEP_HAVE_MPI
#include "backends/mpi/mpi_backend.h"
#endif
#ifdef LOCKSTEP_HAVE_NCCL
#include "backends/nccl/nccl_backend.h"
#endif

namespace lockstep {

Transfer::~Transfer() = default;
QueuedCall::~QueuedCall() = default;
Backend::~Backend() = default;

std::shared_ptr<QueuedCall> Backend::queue(const std::function<void()>& call, Stream /*stream*/) {
  call();
  return nullptr;
}

namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendFactory> factories;  // guarded by mutex
};

// The one table of the process: names are given to it before there is any group to hold it.
Registry& registry() {
  static Registry instance{{},
                           {
                               {"threads", make_threads_backend},
                               {"shm", make_shm_backend},
#ifdef LOCKSTEP_HAVE_GLOO
                               {"gloo", make_gloo_backend},
                               {"hierarchical", make_hierarchical_backend},
#endif
#ifdef LOCKSTEP_HAVE_MPI
                               {"mpi", make_mpi_backend},
#endif
#ifdef LOCKSTEP_HAVE_NCCL
                               {"nccl", make_nccl_backend},
#endif
                           }};
  return instance;
}

}  // namespace

void register_backend(const std::string& name, BackendFactory factory) {
  if (name.empty() || name == "auto" || name.find_first_of(":,") != std::string::npos)
    throw UsageError(text("'", name, "' cannot be the name of a backend; use letters, digits and '_'"));
  std::lock_guard lock(registry().mutex);
  if (!registry().factories.emplace(name, std::move(factory)).second)
    throw UsageError(text("there already is a backend '", name, "'; register yours under another name"));
}

std::vector<std::string> available_backends() {
  std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry().factories) names.push_back(name);
  return names;
}

BackendFactory find_backend(const std::string& name) {
  {
    std::lock_guard lock(registry().mutex);
    auto found = registry().factories.find(name);
    if (found != registry().factories.end()) return found->second;
  }
  bool is_known = name == "gloo" || name == "mpi" || name == "nccl" || name == "shm";
  throw UsageError(text("there is no backend '", name, "'; this build has ", enumerate(available_backends()),
                        " and auto",
                        is_known ? text(". The build's summary says why ", name, " is not in it") : std::string()));
}

}  // namespace lockstep
