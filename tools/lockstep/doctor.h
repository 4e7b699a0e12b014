#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/environment.h>

#include "finding.h"
#include "machine.h"
#include "meeting.h"
#include "network.h"
#include "probe.h"
#include "storage.h"

namespace lockstep::tool {

/// All that `lockstep doctor` judges by.
struct Facts {
  Meeting meeting{};
  Network network{};
  SecretFile secret{};
  std::vector<Folder> folders{};
  Machine machine{};
  Probe probe{};
  std::optional<std::string> omp_num_threads{};
  std::optional<std::string> interface {};       // LOCKSTEP_INTERFACE
  std::optional<std::string> visible_devices{};  // CUDA_VISIBLE_DEVICES
};

struct DoctorOptions {
  std::string probe_program{};                     // empty: the one beside this program
  std::optional<std::string> checkpoint_folder{};  // none: not looked at
};

/// Looks at this machine with the variables that `lookup` answers. May take seconds: it resolves names and loads
/// LibTorch in a helper program.
Facts gather_facts(const Environment::Lookup& lookup, const DoctorOptions& options);

/// Pure: all findings, by subject.
std::vector<Section> examine(const Facts& facts);

/// How many findings have this status.
int count(const std::vector<Section>& sections, Status status);

/// The variable's value in this process: a lookup.
std::optional<std::string> process_variable(const std::string& variable);

}  // namespace lockstep::tool
