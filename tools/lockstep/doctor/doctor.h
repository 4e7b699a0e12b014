#pragma once

#include <optional>
#include <string>
#include <vector>

#include "doctor/env_report.h"
#include "doctor/findings.h"
#include "doctor/gpus.h"
#include "doctor/machine.h"
#include "doctor/network.h"
#include "doctor/storage.h"
#include "doctor/torch_probe.h"

namespace lockstep::tool {

/// The input of the checks of `lockstep doctor`.
struct Facts {
  Rendezvous rendezvous{};
  Network network{};
  SecretFile secret{};
  std::vector<Folder> folders{};
  Machine machine{};
  Probe probe{};
  Gpus gpus{};
  Variables nccl_variables{};  // only variables that are set
  std::optional<std::string> omp_num_threads{};
  std::optional<std::string> interface {};  // LOCKSTEP_INTERFACE
};

struct DoctorOptions {
  std::string probe_program{};                     // empty: the lockstep-probe beside this program
  std::optional<std::string> checkpoint_folder{};  // none: not checked
};

/// Gathers the facts about this machine and the given variables. May take seconds: resolves names, runs nvidia-smi, and
/// loads LibTorch in a helper program.
Facts gather_facts(const Variables& variables, const DoctorOptions& options);

/// Runs all checks; returns the findings, grouped by subject. Pure.
std::vector<Section> examine(const Facts& facts);

}  // namespace lockstep::tool
