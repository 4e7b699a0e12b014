#include "comm/setup/backend_choice.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "backends/common/reduction.h"
#include "backends/factories.h"
#include "base/text.h"

namespace lockstep {
namespace {

constexpr const char* kAuto = "auto";
constexpr const char* kNccl = "nccl";  // the only backend for CUDA tensors

struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendFactory> factories;  // guarded by mutex
};

// One registry per process, because backends are registered before any group exists.
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

Transfer::~Transfer() = default;
QueuedCall::~QueuedCall() = default;
Backend::~Backend() = default;

void Backend::reduce_scatter_v(const at::Tensor& output, const std::vector<at::Tensor>& inputs, ReduceOp op,
                               const CallInfo& call) {
  std::vector<at::Tensor> received(inputs.size());
  std::vector<const void*> parts;
  if (output.defined()) {
    received = at::empty({static_cast<int64_t>(inputs.size()), output.numel()}, output.options()).unbind();
    for (const auto& part : received) parts.push_back(part.data_ptr());
  }
  all_to_all_v(received, inputs, call);
  if (output.defined())
    reduce_elements(output.data_ptr(), {parts.data(), parts.size()}, output.numel(), output.scalar_type(), op);
}

at::Tensor Backend::allocate_shared(int64_t, const CallInfo&) {
  throw UsageError("allocate_shared: the ranks of this backend do not share memory; use 'shm' or 'threads'");
}

void Backend::reduce_ranges(const at::Tensor&, ReduceOp, const std::vector<Range>&, const Consume&, const CallInfo&) {
  throw UsageError("reduce_ranges: the ranks of this backend do not share memory; use 'shm' or 'threads'");
}

std::shared_ptr<QueuedCall> Backend::queue(const std::function<void()>& call, Stream /*stream*/) {
  call();
  return nullptr;
}

void register_backend(const std::string& name, BackendFactory factory) {
  if (name.empty() || name == kAuto || name.find_first_of(":,") != std::string::npos)
    throw UsageError(text("'", name, "' cannot be the name of a backend; use letters, digits and '_'"));
  std::lock_guard lock(registry().mutex);
  if (!registry().factories.emplace(name, std::move(factory)).second)
    throw UsageError(text("backend '", name, "' is already registered; choose another name"));
}

std::vector<std::string> available_backends() {
  std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry().factories) names.push_back(name);
  return names;
}

namespace detail {

BackendFactory find_backend(const std::string& name) {
  {
    std::lock_guard lock(registry().mutex);
    auto found = registry().factories.find(name);
    if (found != registry().factories.end()) return found->second;
  }
  bool is_known = name == "gloo" || name == "mpi" || name == "nccl" || name == "shm";
  auto names = available_backends();
  names.push_back(kAuto);
  throw UsageError(text("there is no backend '", name, "'; this build has ", enumerate(names),
                        is_known ? "; run lockstep doctor, which names what is missing" : ""));
}

static std::string checked_name(const std::string& name) {
  if (name != kAuto) find_backend(name);
  return name;
}

BackendNames parse_backends(const std::string& asked) {
  if (asked == kAuto) return {kAuto, kAuto};
  if (asked.find(':') == std::string::npos)
    return asked == kNccl ? BackendNames{.cuda = checked_name(asked)} : BackendNames{.cpu = checked_name(asked)};
  BackendNames names;
  std::istringstream parts(asked);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto colon = part.find(':');
    const auto device = part.substr(0, colon);
    auto* name = device == "cpu" ? &names.cpu : device == "cuda" ? &names.cuda : nullptr;
    if (!name || !name->empty() || colon == std::string::npos)
      throw UsageError(
          text("backend is '", asked, "'; expected one name, or a name for each device as in \"cpu:gloo,cuda:nccl\""));
    *name = checked_name(part.substr(colon + 1));
  }
  if (names.cpu == kNccl)
    throw UsageError(
        text("backend is '", asked, "', but nccl supports only CUDA tensors; for cpu use another backend"));
  if (!names.cuda.empty() && names.cuda != kAuto && names.cuda != kNccl)
    throw UsageError(
        text("backend is '", asked, "', but ", names.cuda, " supports only CPU tensors; for cuda use nccl"));
  return names;
}

std::vector<std::string> choose_backends(const std::vector<std::string>& host_of_rank,
                                         const std::vector<std::string>& available) {
  if (host_of_rank.size() == 1) return {"threads"};
  const size_t hosts = std::set<std::string>(host_of_rank.begin(), host_of_rank.end()).size();
  std::vector<std::string> choice;
  if (hosts == 1) {
    choice = {"shm", "gloo"};
  } else if (hosts < host_of_rank.size()) {
    choice = {"hierarchical", "gloo"};
  } else {
    choice = {"gloo"};
  }
  std::erase_if(choice, [&](const std::string& name) {
    return std::find(available.begin(), available.end(), name) == available.end();
  });
  if (choice.empty())
    throw UsageError(text("the ranks are on ", hosts,
                          " hosts, but this build has no backend that connects hosts (it has ", enumerate(available),
                          "); install libgloo-dev and rebuild lockstep"));
  return choice;
}

}  // namespace detail
}  // namespace lockstep
