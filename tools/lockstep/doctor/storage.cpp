#include "doctor/storage.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;

std::string try_to_write(const std::string& folder) {
  std::string path = folder + "/lockstep-doctor-XXXXXX";
  const int file = ::mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) return ::strerror(errno);
  const std::string bytes(4096, 'x');
  const bool is_written = ::write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()) &&
                          ::fsync(file) == 0;  // some file systems report a full disk only here
  const int error = errno;
  ::close(file);
  ::unlink(path.c_str());
  return is_written ? "" : ::strerror(error);
}

Folder try_folder(const std::string& purpose, const std::string& path, const std::string& source) {
  const auto space = space_at(path);
  return {purpose, path, source, try_to_write(path), space.has_value(), space.value_or(Space{})};
}

std::string variable_or_empty(const Environment::Lookup& lookup, const std::string& variable) {
  return lookup(variable).value_or("");
}

}  // namespace

std::vector<Folder> try_folders(const Environment::Lookup& lookup, const Rendezvous& rendezvous,
                                const std::optional<std::string>& checkpoint_folder) {
  const std::string named = variable_or_empty(lookup, "TMPDIR");
  std::vector<Folder> folders{
      try_folder("temporary files", named.empty() ? "/tmp" : named, named.empty() ? "" : "TMPDIR")};
  const std::string flight = variable_or_empty(lookup, "LOCKSTEP_FLIGHT_DIR");  // unset: the folder above
  if (!flight.empty()) folders.push_back(try_folder(kFlightRecorder, flight, "LOCKSTEP_FLIGHT_DIR"));
  if (rendezvous.kind == Rendezvous::Kind::kFile)
    folders.push_back(try_folder("meeting file", fs::path(rendezvous.file).parent_path(), "LOCKSTEP_INIT_METHOD"));
  if (checkpoint_folder) folders.push_back(try_folder("checkpoints", *checkpoint_folder, "--checkpoint-dir"));
  return folders;
}

SecretFile read_secret_file_status(const Environment::Lookup& lookup) {
  SecretFile secret;
  const auto named = lookup("LOCKSTEP_SECRET_FILE");
  const std::string state = variable_or_empty(lookup, "XDG_STATE_HOME");
  secret.is_named = named.has_value();
  secret.path =
      named ? *named
            : (state.empty() ? variable_or_empty(lookup, "HOME") + "/.local/state" : state) + "/lockstep/secret";
  struct stat status {};
  if (::stat(secret.path.c_str(), &status) != 0) {
    secret.exists = errno != ENOENT && errno != ENOTDIR;
    secret.failure = ::strerror(errno);
    return secret;
  }
  secret.exists = true;
  secret.is_regular = S_ISREG(status.st_mode);
  secret.has_trusted_owner = status.st_uid == ::geteuid() || status.st_uid == 0;
  secret.mode = status.st_mode & 07777;
  secret.bytes = static_cast<uint64_t>(status.st_size);
  if (::euidaccess(secret.path.c_str(), R_OK) != 0) secret.failure = ::strerror(errno);
  return secret;
}

}  // namespace lockstep::tool
