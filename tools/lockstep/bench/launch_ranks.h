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

/// An open file that other processes of this user reach by its path, for as long as this lives.
class SharedFile {
 public:
  /// Takes what `call` has returned. SystemError when that is no file.
  SharedFile(int file, const char* call) : file_(file) {
    if (file_ < 0) throw SystemError(fmt::format("{}: {}", call, std::strerror(errno)));
  }
  ~SharedFile() { close(); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  /// Empty, and on no disk.
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

/// Under which everything is measured: the program of the ranks, what it can do, and the cores that it gets.

/// Where lockstep-bench is. SystemError when it is missing.
std::string find_bench_program();

/// The backends of this build, as lockstep-bench tells.
std::vector<std::string> query_backends(const std::string& program);

/// Why `mpi` cannot be measured where there is no mpirun.
inline constexpr const char* kNoMpirun =
    "its ranks are started by mpirun, which is not in PATH (apt-get install openmpi-bin)";

/// For when `option` asks for mpi. UsageError where there is no mpirun.
void require_mpirun(const std::string& option);

/// Gives each rank cores of its own where there are enough, and the user lets it.
void decide_core_binding(RunPlan& plan, const BenchArguments& arguments, const tool::Machine& machine);

/// "2 ranks of 1 thread on 2 cores of Neoverse-V1, pinned".
std::string describe_conditions(const RunPlan& plan, int threads, const tool::Machine& machine);

struct Python {
  std::string program{};  // a path
  std::string torch{};    // the version of its torch
};

/// The first of python3 in PATH and /usr/bin/python3 that has torch with this library: Gloo, or NCCL and a GPU.
/// UsageError saying what each lacks when none has. Starts both, which takes seconds.
Python find_python(const std::string& library);

struct RankOptions {
  std::vector<std::string> command{};  // lockstep-bench, and what stands before the plan
  int threads = 1;                     // of each rank
  bool by_mpirun = false;              // the ranks of `mpi` can be started in no other way
};

/// How `ranks` ranks are started with this plan: by our launcher, or by mpirun under it. Our launcher hosts the store
/// in both cases. Pure.
LaunchOptions rank_launch_options(int ranks, const std::string& plan, const RankOptions& options);

/// Gives the plan its page and its results, and runs ranks with what `text` then makes of it. `on_line` gets what rank
/// 0 says, on a thread of its own, before this returns. Returns the launcher's exit code; says on stderr what went
/// wrong.
int run_ranks(RunPlan& plan, const std::function<std::string()>& text, const RankOptions& options,
              const std::function<void(const std::string&)>& on_line);

}  // namespace lockstep::bench
