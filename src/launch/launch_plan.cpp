#include "launch/launch_plan.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>

#include <lockstep/error.h>

#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/process_id.h"
#include "rendezvous/rendezvous.h"

extern char** environ;

namespace lockstep {
namespace {

constexpr int kMaxWorkers = 4096;
constexpr int kStdout = 1, kStderr = 2;  // torchrun's numbers for streams

int count_workers(const std::string& written, const Machine& machine, const Environment::Lookup& lookup) {
  const int gpus = written == "auto" || written == "gpu" ? machine.gpus(lookup) : 0;
  if (written == "cpu" || (written == "auto" && gpus == 0)) return machine.usable_cores();
  if (written == "auto") return gpus;
  if (written == "gpu") {
    if (gpus > 0) return gpus;
    throw UsageError(
        "--nproc-per-node gpu: no GPU is visible on this host; check nvidia-smi and CUDA_VISIBLE_DEVICES, "
        "or use --nproc-per-node cpu or a number");
  }
  auto count = parse_number<int>(written);
  if (count && *count >= 1 && *count <= kMaxWorkers) return *count;
  throw UsageError(
      text("--nproc-per-node is \"", written, "\": it must be a number from 1 to ", kMaxWorkers, ", auto, cpu or gpu"));
}

/// Parses "3" or "0:3,1:1": the streams of all or of each local rank, as a bit mask of 1 (stdout) and 2 (stderr).
std::vector<int> read_streams(const std::string& flag, const std::string& written, int workers) {
  std::vector<int> streams(static_cast<size_t>(workers), 0);
  auto refuse = [&] {
    throw UsageError(text(flag, " is \"", written, "\": it must be 0, 1 (stdout), 2 (stderr) or 3 (both), or one ",
                          "such number per local rank, as in 0:3,1:1"));
  };
  auto read = [&](std::string_view number) {
    auto value = parse_number<int>(number);
    if (!value || *value < 0 || *value > 3) refuse();
    return *value;
  };
  if (written.find(':') == written.npos) return std::vector<int>(streams.size(), read(written));
  std::istringstream entries(written);
  for (std::string entry; std::getline(entries, entry, ',');) {
    auto colon = entry.find(':');
    auto rank = parse_number<size_t>(entry.substr(0, colon));
    if (colon == entry.npos || !rank || *rank >= streams.size()) refuse();
    streams[*rank] = read(std::string_view(entry).substr(colon + 1));
  }
  return streams;
}

std::vector<OutputRoutes> route_streams(const LaunchOptions& options, int workers) {
  const bool has_files = !options.log_dir.empty();
  for (const auto& [flag, value] : {std::pair("--tee", options.tee), std::pair("--redirects", options.redirects)})
    if (!value.empty() && !has_files)
      throw UsageError(text(flag, " writes to files: set their folder with --log-dir DIR"));
  std::vector<OutputRoutes> routes(static_cast<size_t>(workers), OutputRoutes{{true, has_files}, {true, has_files}});
  std::vector<int> hidden(routes.size(), 0), shown(routes.size(), 0);
  if (!options.redirects.empty()) hidden = read_streams("--redirects", options.redirects, workers);
  if (!options.tee.empty()) shown = read_streams("--tee", options.tee, workers);
  std::vector<bool> is_shown(routes.size(), options.shown_ranks.empty());
  for (int rank : options.shown_ranks) {
    if (rank < 0 || rank >= workers)
      throw UsageError(
          text("--local-ranks-filter names local rank ", rank, ", but local ranks range from 0 to ", workers - 1));
    is_shown[static_cast<size_t>(rank)] = true;
  }
  for (size_t rank = 0; rank < routes.size(); ++rank) {
    const int visible = is_shown[rank] ? ~hidden[rank] | shown[rank] : 0;
    routes[rank].out.to_console = visible & kStdout;
    routes[rank].err.to_console = visible & kStderr;
  }
  return routes;
}

void find_program(const std::string& program, const Environment::Lookup& lookup) {
  auto is_program = [](const std::string& path) { return ::access(path.c_str(), X_OK) == 0; };
  if (program.find('/') != program.npos) {
    if (is_program(program)) return;
    throw UsageError(text("cannot run ", program, ": ", std::strerror(errno),
                          errno == EACCES ? text("; chmod +x ", program, "?") : "; check the path"));
  }
  std::istringstream folders(lookup("PATH").value_or("/usr/bin:/bin"));
  for (std::string folder; std::getline(folders, folder, ':');)
    if (is_program((folder.empty() ? "." : folder) + "/" + program)) return;
  if (::access(program.c_str(), F_OK) == 0)
    throw UsageError(text("no program ", program, " in PATH, but this folder has one: use ./", program));
  throw UsageError(text("no program ", program, " in PATH"));
}

std::string make_job_id(const Environment::Lookup& lookup) {
  if (auto name = job_name(lookup); !name.empty()) return name;
  return text("run-", this_process().host, "-", ::getpid());
}

std::string name_of(const std::string& entry) {
  return entry.substr(0, entry.find('='));
}

}  // namespace

Plan make_plan(const LaunchOptions& options, const Machine& machine, const Environment::Lookup& lookup) {
  if (options.command.empty())
    throw UsageError("no program to run: lockstep run [options] PROGRAM [arguments]; see lockstep run --help");
  Plan plan;
  plan.node = find_node(options, lookup);
  plan.workers = count_workers(options.workers_per_node, machine, lookup);
  if (options.max_restarts < 0)
    throw UsageError(text("--max-restarts is ", options.max_restarts, ": it must be 0 or more"));
  if (options.grace.count() < 0) throw UsageError("--grace is negative: it must be 0 s or more");
  if (options.omp_threads && *options.omp_threads < 1)
    throw UsageError(text("--omp-threads is ", *options.omp_threads, ": it must be 1 or more"));
  if (options.omp_threads)
    plan.threads = *options.omp_threads;
  else if (!lookup("OMP_NUM_THREADS"))
    plan.threads = std::max(1, machine.usable_cores() / plan.workers);
  const auto cores = machine.cores();
  if (options.bind && cores.size() < static_cast<size_t>(plan.workers))
    throw UsageError(text("--bind gives each worker its own cores, but there are ", cores.size(), " cores for ",
                          plan.workers, " workers: start fewer workers, or omit --bind"));
  plan.cores = options.bind ? assign_cores(cores, plan.workers) : std::vector<std::vector<int>>(plan.workers);
  plan.routes = route_streams(options, plan.workers);
  plan.job_id = make_job_id(lookup);
  find_program(options.command.front(), lookup);
  return plan;
}

std::map<std::string, std::string> worker_variables(const LaunchOptions& options, const Plan& plan,
                                                    const Layout& layout, int local_rank,
                                                    const std::string& secret_file) {
  const int rank = layout.first_rank + local_rank;
  std::map<std::string, std::string> variables{
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", std::to_string(layout.world_size)},
      {"LOCAL_WORLD_SIZE", std::to_string(plan.workers)},
      {"GROUP_RANK", std::to_string(plan.node.rank)},
      {"NODE_RANK", std::to_string(plan.node.rank)},
      {"MASTER_ADDR", layout.store.host},
      {"MASTER_PORT", std::to_string(layout.store.port)},
      {"LOCKSTEP_STORE_HOSTED", "1"},
      {"LOCKSTEP_JOB_ID", layout.job_id},
      {"LOCKSTEP_RESTART_COUNT", std::to_string(layout.generation)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(layout.generation)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
  };
  if (plan.threads > 0) variables["OMP_NUM_THREADS"] = std::to_string(plan.threads);
  if (!secret_file.empty()) variables["LOCKSTEP_SECRET_FILE"] = secret_file;
  if (!options.role.empty()) {
    variables["ROLE_NAME"] = options.role;
    variables["ROLE_RANK"] = std::to_string(rank);
    variables["ROLE_WORLD_SIZE"] = std::to_string(layout.world_size);
  }
  return variables;
}

WorkerSpec worker_spec(const LaunchOptions& options, const Plan& plan, const Layout& layout, int local_rank,
                       const std::string& secret_file) {
  WorkerSpec spec;
  spec.command = options.command;
  if (options.pass_local_rank) spec.command.push_back(text("--local_rank=", local_rank));
  spec.cores = plan.cores.at(static_cast<size_t>(local_rank));
  auto variables = worker_variables(options, plan, layout, local_rank, secret_file);
  // Remove variables of an outer or earlier launcher, which would override the variables of this launcher.
  for (const char* stale : {"LOCKSTEP_SECRET_FILE", "LOCKSTEP_INIT_METHOD", "LOCKSTEP_TERMINAL", "LOCKSTEP_RUN_NOTE",
                            "TORCHELASTIC_USE_AGENT_STORE"})
    if (!variables.contains(stale)) variables[stale];
  for (char** entry = environ; *entry; ++entry)
    if (!variables.contains(name_of(*entry))) spec.environment.emplace_back(*entry);
  for (const auto& [name, value] : variables)
    if (!value.empty()) spec.environment.push_back(text(name, "=", value));
  return spec;
}

std::string describe_plan(const LaunchOptions& options, const Plan& plan, const Layout& layout) {
  auto command_of = [&](int rank) { return worker_spec(options, plan, layout, rank, options.secret_file).command; };
  if (options.json) {
    nlohmann::ordered_json json{{"node_rank", plan.node.rank},
                                {"nodes", plan.node.nodes},
                                {"store", to_string(layout.store)},
                                {"max_restarts", options.max_restarts},
                                {"workers", nlohmann::json::array()}};
    for (int rank = 0; rank < plan.workers; ++rank)
      json["workers"].push_back({{"command", command_of(rank)},
                                 {"environment", worker_variables(options, plan, layout, rank, options.secret_file)},
                                 {"cores", plan.cores[static_cast<size_t>(rank)]}});
    return json.dump() + "\n";
  }
  std::ostringstream out;
  for (int rank = 0; rank < plan.workers; ++rank) {
    out << "[" << layout.first_rank + rank << "]";
    for (const auto& [name, value] : worker_variables(options, plan, layout, rank, options.secret_file))
      out << " " << name << "=" << value;
    const auto& cores = plan.cores[static_cast<size_t>(rank)];
    if (!cores.empty()) out << " cores=" << enumerate(cores);
    for (const auto& argument : command_of(rank)) out << " " << argument;
    out << "\n";
  }
  return out.str();
}

}  // namespace lockstep
