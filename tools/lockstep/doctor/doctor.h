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

/// All that `lockstep doctor` judges by.
struct Facts {
  Rendezvous rendezvous{};
  Network network{};
  SecretFile secret{};
  std::vector<Folder> folders{};
  Machine machine{};
  Probe probe{};
  Gpus gpus{};
  Variables nccl_variables{};  // those that are set
  std::optional<std::string> omp_num_threads{};
  std::optional<std::string> interface {};  // LOCKSTEP_INTERFACE
};

struct DoctorOptions {
  std::string probe_program{};                     // empty: the one beside this program
  std::optional<std::string> checkpoint_folder{};  // none: not looked at
};

/// Looks at this machine with the variables that are given. May take seconds: it resolves names, asks nvidia-smi, and
/// loads LibTorch in a helper program.
Facts gather_facts(const Variables& variables, const DoctorOptions& options);

/// Pure: all findings, by subject.
std::vector<Section> examine(const Facts& facts);

}  // namespace lockstep::tool
