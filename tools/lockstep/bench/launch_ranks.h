#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <lockstep/error.h>
#include <lockstep/launcher.h>

#include "bench/rank_protocol.h"
#include "bench/run_bench.h"
#include "doctor/machine.h"

namespace lockstep::bench {

/// Owns a file descriptor. Other processes of this user can open the file by path() while this object exists.
class SharedFile {
 public:
  /// Takes ownership of `file`, the result of `call`. Throws SystemError if the call failed.
  SharedFile(int file, const char* call) : file_(file) {
    if (file_ < 0) throw SystemError(fmt::format("{}: {}", call, std::strerror(errno)));
  }
  ~SharedFile() { close(); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  /// An empty file in memory.
  static SharedFile in_memory() { return {::memfd_create("lockstep-bench", MFD_CLOEXEC), "memfd_create"}; }

  int get() const { return file_; }
  std::string path() const { return fmt::format("/proc/{}/fd/{}", ::getpid(), file_); }
  void close() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
  }

 private:
  int file_;
};

/// Returns the path of lockstep-bench. Throws SystemError if it is missing.
std::string find_bench_program();

/// Runs lockstep-bench to list the backends of this build.
std::vector<std::string> query_backends(const std::string& program);

/// Why `mpi` cannot be measured without mpirun.
inline constexpr const char* kNoMpirun = "mpirun, which starts its ranks, is not in PATH (apt-get install openmpi-bin)";

/// Throws UsageError if mpirun is missing; `option` is the option that selected mpi.
void require_mpirun(const std::string& option);

/// Pins each rank to its own cores if there are enough and --no-bind is not given.
void decide_core_binding(RunPlan& plan, const BenchArguments& arguments, const tool::Machine& machine);

/// "2 ranks of 1 thread on 2 cores of Neoverse-V1, pinned".
std::string describe_conditions(const RunPlan& plan, int threads, const tool::Machine& machine);

struct Python {
  std::string program{};  // path of the interpreter
  std::string torch{};    // version of its torch
};

/// Returns the first of python3 in PATH and /usr/bin/python3, or `wanted` if it is not empty, that has torch with this
/// library: Gloo, or NCCL and a GPU; empty for torch alone. Throws UsageError with the reason for each interpreter if
/// no interpreter has it. Takes seconds.
Python find_python(const std::string& library, const std::string& wanted);

struct RankOptions {
  std::vector<std::string> command{};  // lockstep-bench and its arguments before the plan
  int threads = 1;                     // per rank
  bool by_mpirun = false;              // required by the backend `mpi`
};

/// The options to launch `ranks` ranks with this plan: by lockstep's launcher, or by mpirun as its single worker. The
/// launcher hosts the store in both cases. Pure.
LaunchOptions rank_launch_options(int ranks, const std::string& plan, const RankOptions& options);

/// Creates the page and the results file of the plan, then runs the ranks with the plan serialized by `text`. Calls
/// `on_line` on another thread for each line that rank 0 writes; all calls finish before this returns. Returns the
/// launcher's exit code. The launcher prints errors to stderr.
int run_ranks(RunPlan& plan, const std::function<std::string()>& text, const RankOptions& options,
              const std::function<void(const std::string&)>& on_line);

}  // namespace lockstep::bench
