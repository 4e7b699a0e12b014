#include "bench/request.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

#include "bench/operation.h"

namespace lockstep::bench {
namespace {

constexpr int kMinRounds = 5;
constexpr int kMaxRanks = 1024;

std::string value_or(const std::string& value, const char* otherwise) {
  return value.empty() ? otherwise : value;
}

/// The expected order on one host: the other backends are compared with the first.
std::vector<std::string> fastest_first(std::vector<std::string> backends) {
  static constexpr const char* kOrder[] = {"shm", "nccl", "mpi", "gloo"};
  const auto place = [](const std::string& name) { return std::find(std::begin(kOrder), std::end(kOrder), name); };
  std::stable_sort(backends.begin(), backends.end(),
                   [&](const std::string& a, const std::string& b) { return place(a) < place(b); });
  return backends;
}

std::vector<std::string> choose_backends(const std::vector<std::string>& wanted, std::vector<std::string> available) {
  std::erase(available, "threads");  // its ranks are threads, not processes
  if (available.empty())
    throw UsageError("this build has no backend whose ranks are processes: build lockstep with Gloo");
  if (wanted.empty()) return fastest_first(available);
  std::vector<std::string> chosen;
  for (const auto& name : wanted) {
    if (!contains(available, name))
      throw UsageError(
          fmt::format("--backends: unknown backend '{}'; this build has {}", name, fmt::join(available, ", ")));
    if (contains(chosen, name)) throw UsageError(fmt::format("--backends contains '{}' twice", name));
    chosen.push_back(name);
  }
  return chosen;
}

std::vector<int64_t> choose_sizes(const Request& request) {
  if (request.sizes.empty())
    return size_range(parse_bytes("--min", value_or(request.min_size, kDefaultMin)),
                      parse_bytes("--max", value_or(request.max_size, kDefaultMax)),
                      request.factor == 0 ? kDefaultFactor : request.factor);
  std::vector<int64_t> sizes;
  for (const auto& written : request.sizes) sizes.push_back(parse_bytes("--sizes", written));
  return sizes;
}

Memory memory_named(const std::string& name) {
  for (Memory memory : {Memory::kAllocated, Memory::kOrdinary, Memory::kBoth})
    if (name == name_of(memory)) return memory;
  throw UsageError(fmt::format("--memory is \"{}\": it must be allocated, ordinary or both", name));
}

void reject_checkpoint_options(const Request& request) {
  if (!request.bytes.empty() || !request.folder.empty())
    throw UsageError(
        fmt::format("--bytes and --folder apply only to {}, not to {}: remove them", kCheckpoint, request.operation));
}

/// Throws UsageError unless --against, and --python with it, can be used.
void check_against(const Request& request) {
  if (!request.against.empty() && request.against != "python")
    throw UsageError(fmt::format("--against is \"{}\": it must be python, or omitted", request.against));
  if (!request.python.empty() && request.against.empty())
    throw UsageError("--python names the interpreter of --against python: add that, or remove it");
}

/// The options of collectives that were given.
std::vector<std::string> collective_options(const Request& request) {
  const std::pair<const char*, bool> kForMessages[] = {
      {"--min", !request.min_size.empty()}, {"--max", !request.max_size.empty()}, {"--factor", request.factor != 0},
      {"--sizes", !request.sizes.empty()},  {"--dtype", !request.dtype.empty()},  {"--op", !request.redop.empty()},
      {"--memory", !request.memory.empty()}};
  std::vector<std::string> given;
  for (const auto& [option, is_given] : kForMessages)
    if (is_given) given.emplace_back(option);
  return given;
}

void reject_compile(const Request& request) {
  if (!request.compile_modes.empty())
    throw UsageError(fmt::format("--compile applies only to {}, not to {}: remove it", kGpu, request.operation));
}

/// Throws UsageError for options that would have no effect.
void reject_unused_options(const Request& request, Operation operation) {
  reject_checkpoint_options(request);
  reject_compile(request);
  if (!request.python.empty())
    throw UsageError(fmt::format("--python applies only with --against, not to {}: remove it", name_of(operation)));
  if (!request.models.empty() || !request.against.empty() || !request.backend.empty() || !request.optimizer.empty())
    throw UsageError(fmt::format(
        "--models, --against, --backend and --optimizer do not apply to {}, only to {}, {} or {}: remove them "
        "(--backends selects the backends to measure)",
        name_of(operation), kDdp, kGpu, kCheckpoint));
  if (!request.redop.empty() && !reduces(operation))
    throw UsageError(
        fmt::format("--op applies only to all-reduce and reduce-scatter, not to {}: remove it", name_of(operation)));
  if (operation != Operation::kBarrier) return;
  if (!request.min_size.empty() || !request.max_size.empty() || request.factor != 0 || !request.sizes.empty() ||
      !request.dtype.empty() || !request.memory.empty())
    throw UsageError("a barrier carries no data: remove --min, --max, --factor, --sizes, --dtype and --memory");
}

std::string choose_backend(const std::string& wanted, std::vector<std::string> available) {
  std::erase(available, "threads");  // its ranks are threads, not processes
  available.insert(available.begin(), DdpPlan().backend);
  if (wanted.empty()) return available[0];
  if (!contains(available, wanted))
    throw UsageError(
        fmt::format("--backend: unknown backend '{}'; this build has {}", wanted, fmt::join(available, ", ")));
  return wanted;
}

}  // namespace

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

RunPlan make_run_plan(const Request& request) {
  const int ranks = request.ranks.value_or(kDefaultRanks);
  if (ranks < 1 || ranks > kMaxRanks)
    throw UsageError(fmt::format("-n is {}: it must be a number of ranks from 1 to {}", ranks, kMaxRanks));
  if (request.rounds != 0 && request.rounds < kMinRounds)
    throw UsageError(fmt::format("--rounds is {}: it must be {} or more, or omitted", request.rounds, kMinRounds));
  RunPlan plan;
  plan.ranks = ranks;
  plan.rounds = request.rounds;
  plan.check = request.check;
  return plan;
}

CollectivePlan make_collective_plan(const Request& request, const std::vector<std::string>& available) {
  CollectivePlan plan{make_run_plan(request)};
  plan.operation = operation_named(request.operation);
  reject_unused_options(request, plan.operation);
  plan.backends = choose_backends(request.backends, available);
  plan.dtype = value_or(request.dtype, plan.dtype.c_str());
  const int bytes = element_bytes(plan.dtype);
  plan.redop = reduces(plan.operation) ? value_or(request.redop, plan.redop.c_str()) : "none";
  if (reduces(plan.operation)) check_reduction(plan.redop, plan.dtype);
  plan.sizes = {0};
  if (plan.operation != Operation::kBarrier)
    plan.sizes = round_to_elements(plan.operation, choose_sizes(request), bytes, plan.ranks);
  plan.memory = memory_named(value_or(request.memory, name_of(plan.memory)));
  return plan;
}

int64_t memory_bytes(const CollectivePlan& plan) {
  const int64_t kinds = plan.memory == Memory::kBoth ? 2 : 1;
  // Two buffers per backend and kind of memory: input and output, or a buffer inside the backend. One for the floor.
  const int64_t buffers = 2 * kinds * static_cast<int64_t>(plan.backends.size()) + 1;
  return buffers * plan.ranks * *std::max_element(plan.sizes.begin(), plan.sizes.end());
}

void reject_collective_options(const Request& request) {
  reject_checkpoint_options(request);
  const auto given = collective_options(request);
  if (!given.empty())
    throw UsageError(fmt::format("{} trains models and has no message options: remove {}", request.operation,
                                 fmt::join(given, ", ")));
  check_against(request);
}

std::vector<std::string> choose_models(const std::vector<std::string>& wanted, const std::vector<std::string>& known) {
  if (wanted.empty()) return known;
  std::vector<std::string> chosen;
  for (const auto& name : wanted) {
    if (!contains(known, name))
      throw UsageError(fmt::format("--models: unknown model '{}'; it must be one of {}", name, fmt::join(known, ", ")));
    if (contains(chosen, name)) throw UsageError(fmt::format("--models contains '{}' twice", name));
    chosen.push_back(name);
  }
  return chosen;
}

DdpPlan make_ddp_plan(const Request& request, const std::vector<std::string>& available) {
  reject_collective_options(request);
  reject_compile(request);
  if (!request.backends.empty())
    throw UsageError(fmt::format("{} uses one backend: use --backend instead of --backends", kDdp));
  DdpPlan plan{make_run_plan(request)};
  plan.models = choose_models(request.models, model_names());
  plan.backend = choose_backend(request.backend, available);
  if (!request.optimizer.empty()) plan.optimizer = request.optimizer;
  if (!contains({"sgd", "adamw"}, plan.optimizer))
    throw UsageError(fmt::format("--optimizer is '{}': it must be sgd or adamw", plan.optimizer));
  return plan;
}

std::vector<std::string> compile_mode_names() {
  return {"default", "reduce-overhead", "max-autotune"};
}

std::vector<std::string> gpu_model_names() {
  return {"mlp-small", "cnn", "gpt-6x384", "gpt-124m"};
}

GpuPlan make_gpu_plan(const Request& request, const std::vector<std::string>& gpus) {
  reject_collective_options(request);
  if (!request.backend.empty() || !request.backends.empty())
    throw UsageError("gpu always uses nccl: remove --backend and --backends");
  if (!request.optimizer.empty()) throw UsageError("gpu always uses AdamW: remove --optimizer");
  if (request.ranks.value_or(1) != 1)
    throw UsageError(fmt::format("-n is {}: gpu measures one rank on one GPU: remove it", *request.ranks));
  const auto run = make_run_plan(request);
  if (!request.compile_modes.empty() && request.against.empty())
    throw UsageError("--compile needs Python: add --against python");
  for (const auto& mode : request.compile_modes)
    if (!contains(compile_mode_names(), mode))
      throw UsageError(fmt::format("--compile: unknown mode '{}'; it must be one of {}", mode,
                                   fmt::join(compile_mode_names(), ", ")));
  GpuPlan plan{choose_models(request.models, gpu_model_names()), run.rounds, run.check, request.compile_modes};
  if (gpus.empty())
    throw UsageError(
        "gpu needs a GPU, and a build with nccl and LibTorch 2.4 or later: check nvidia-smi and the summary that CMake "
        "prints");
  return plan;
}

CheckpointPlan make_checkpoint_plan(const Request& request) {
  reject_compile(request);
  auto given = collective_options(request);
  if (!request.models.empty()) given.emplace_back("--models");
  if (!request.backend.empty()) given.emplace_back("--backend");
  if (!request.optimizer.empty()) given.emplace_back("--optimizer");
  if (!request.backends.empty()) given.emplace_back("--backends");
  if (request.ranks) given.emplace_back("-n");
  if (!given.empty())
    throw UsageError(fmt::format("{} saves a state in one process and has no use for {}: remove them", kCheckpoint,
                                 fmt::join(given, ", ")));
  check_against(request);
  if (request.rounds == 1) throw UsageError("--rounds is 1: it must be 2 or more, or omitted");
  const auto bytes = parse_bytes("--bytes", value_or(request.bytes, kDefaultStateBytes));
  if (bytes < kMinParameterBytes)
    throw UsageError(
        fmt::format("--bytes is {}: it must be {} or more", format_size(bytes), format_size(kMinParameterBytes)));
  CheckpointPlan plan;
  plan.parameters = plan_parameters(bytes);
  plan.rounds = request.rounds == 0 ? kMinRounds : request.rounds;
  plan.check = request.check;
  return plan;
}

}  // namespace lockstep::bench
