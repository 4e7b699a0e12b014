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
  std::string source{};   // the variable or option that names it; empty: the default
  std::string failure{};  // why nothing can be written there; empty when it can
  bool exists = true;
  Space space{};
};

/// The file that proves to the others that a rank belongs to the job. Its contents are never read.
struct SecretFile {
  std::string path{};
  bool is_named = false;  // by LOCKSTEP_SECRET_FILE; else it is the user's own, made when it is first needed
  bool exists = false;
  std::string failure{};  // why it cannot be read
  bool is_regular = true;
  bool has_trusted_owner = true;  // this user's or root's
  unsigned mode = 0600;
  uint64_t bytes = 0;
};

/// Writes a small file into each folder and removes it again: those for temporary files, for the flight recorder, for
/// the file in which ranks meet, and for checkpoints; of the last three, those that are named.
std::vector<Folder> try_folders(const Environment::Lookup& lookup, const Rendezvous& rendezvous,
                                const std::optional<std::string>& checkpoint_folder);

SecretFile read_secret_file_status(const Environment::Lookup& lookup);

}  // namespace lockstep::tool
