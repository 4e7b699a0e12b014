#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/environment.h>

#include "doctor/machine.h"
#include "doctor/network.h"

namespace lockstep::tool {

inline constexpr const char* kFlightRecorder = "flight recorder";

/// A folder that a job writes to.
struct Folder {
  std::string purpose{};  // "temporary files", kFlightRecorder
  std::string path{};
  std::string source{};   // the variable or option that set the folder; empty: the default
  std::string failure{};  // why writing failed; empty if it worked
  bool exists = true;
  Space space{};
};

/// Status of the secret file, by which ranks authenticate to each other. The contents are never read.
struct SecretFile {
  std::string path{};
  bool is_named = false;  // set by LOCKSTEP_SECRET_FILE; else the user's default file, created on first use
  bool exists = false;
  std::string failure{};  // why it cannot be read
  bool is_regular = true;
  bool has_trusted_owner = true;  // owned by this user or by root
  unsigned mode = 0600;
  uint64_t bytes = 0;
};

/// Writes and removes a small file in each folder: for temporary files, the flight recorder, the rendezvous file and
/// checkpoints. The last three are tried only if they are set.
std::vector<Folder> try_folders(const Environment::Lookup& lookup, const Rendezvous& rendezvous,
                                const std::optional<std::string>& checkpoint_folder);

SecretFile read_secret_file_status(const Environment::Lookup& lookup);

}  // namespace lockstep::tool
