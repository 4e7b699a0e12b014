#pragma once

#include <optional>

#include <lockstep/export.h>
#include <lockstep/launch_options.h>

namespace lockstep {

/// Starts the workers of this node, hosts the job's store on node 0, forwards the workers' output, and returns a
/// LaunchExit when all workers have exited. When it returns, or when this process ends for any reason, all processes
/// that it started are killed. Reports errors on stderr; does not throw.
///
/// The program's main() must begin with run_as_supervisor. The process must have no other child processes and no
/// handlers for SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGTSTP, which launch() handles. Not thread-safe.
LOCKSTEP_EXPORT int launch(const LaunchOptions& options);

/// Must be the first call in a launcher's main(). The launcher starts itself a second time as a supervisor process,
/// which watches over the workers. In the supervisor, returns the exit code after all work is done: return it from
/// main(). In any other process, returns nullopt.
LOCKSTEP_EXPORT std::optional<int> run_as_supervisor(int argc, char** argv);

}  // namespace lockstep
