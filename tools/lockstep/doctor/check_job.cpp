#include "doctor/checks.h"

#include <fmt/format.h>

namespace lockstep::tool {
namespace {

constexpr size_t kSecretBytes = 32;

std::string how_to_create(const std::string& path) {
  return fmt::format("(umask 077 && head -c {} /dev/urandom > {}), and copy it to every host", kSecretBytes, path);
}

/// Applies the same rules to the file as init_process_group.
Finding check_secret_file(const SecretFile& secret) {
  Finding finding{"secret", Status::kError, "", ""};
  const auto& path = secret.path;
  if (!secret.is_regular) {
    finding.found = fmt::format("{} is not a regular file", path);
    finding.remedy = "put the secret into a file: " + how_to_create("job.secret");
  } else if (!secret.has_trusted_owner) {
    finding.found = fmt::format("{} belongs to another user, who could join the job", path);
    finding.remedy = "use a file that you own: " + how_to_create("job.secret");
  } else if ((secret.mode & 077) != 0) {
    finding.found = fmt::format("{} has mode {:04o}, so other users can access it", path, secret.mode);
    finding.remedy = fmt::format("chmod 600 {}", path);
  } else if (!secret.failure.empty()) {
    finding.found = fmt::format("{} cannot be read: {}", path, secret.failure);
    finding.remedy = fmt::format("chmod 600 {}, as its owner", path);
  } else if (secret.bytes < kSecretBytes) {
    finding.found = fmt::format("{} has {} bytes; a secret needs at least {}", path, secret.bytes, kSecretBytes);
    finding.remedy = how_to_create(path);
  } else {
    finding.status = Status::kOk;
    finding.found = fmt::format("{}, {} bytes, mode {:04o}", path, secret.bytes, secret.mode);
  }
  return finding;
}

}  // namespace

Finding check_job(const Rendezvous& rendezvous) {
  const auto& job = rendezvous.job;
  if (rendezvous.kind == Rendezvous::Kind::kUnknown)
    return {
        "launcher", Status::kError, rendezvous.refusal,
        "start the job with lockstep run, which sets the variables, or set them as described in docs/environment.md"};
  if (job.source == Environment::kSingleProcess)
    return {"launcher", Status::kOk, "none: a program started here runs as one process"};
  return {"launcher", Status::kOk,
          fmt::format("{}: rank {} of {}, {} of them on this host", job.source, job.rank, job.world_size,
                      job.local_world_size)};
}

Finding check_secret(const SecretFile& secret, const Rendezvous& rendezvous, const Network& network) {
  if (secret.is_named && !secret.exists)
    return {"secret", Status::kError, fmt::format("LOCKSTEP_SECRET_FILE is {}, which does not exist", secret.path),
            "to create it: " + how_to_create(secret.path)};
  if (secret.is_named) return check_secret_file(secret);
  if (rendezvous.kind == Rendezvous::Kind::kFile)
    return {"secret", Status::kOk, "not needed: a rendezvous file contains its own secret"};
  if (is_beyond_loopback(rendezvous, network))
    return {"secret", Status::kError,
            "LOCKSTEP_SECRET_FILE is not set; beyond loopback, ranks refuse to join without a secret",
            how_to_create("job.secret") + "; then set LOCKSTEP_SECRET_FILE to its path"};
  if (!secret.exists)
    return {"secret", Status::kOk, fmt::format("not needed on loopback: {} is created on first use", secret.path)};
  return check_secret_file(secret);
}

Finding check_folder(const Folder& folder) {
  constexpr uint64_t kScarceBytes = uint64_t{256} << 20;
  const std::string alternative =
      fmt::format("choose another folder with {}", folder.source.empty() ? "TMPDIR" : folder.source);
  Finding finding{folder.purpose, Status::kOk,
                  fmt::format("{}, {} free", folder.path, format_bytes(folder.space.free_bytes))};
  if (!folder.failure.empty()) {
    // Training works without the flight recorder; only a later failure report needs it.
    finding.status = folder.purpose == kFlightRecorder ? Status::kWarning : Status::kError;
    finding.found = fmt::format("{} cannot be written: {}", folder.path, folder.failure);
    finding.remedy =
        fmt::format("{} {}, or {}", folder.exists ? "get write permission for" : "mkdir -p", folder.path, alternative);
  } else if (folder.space.free_bytes < kScarceBytes) {
    finding.status = Status::kWarning;
    finding.remedy = "free some space there, or " + alternative;
  }
  return finding;
}

}  // namespace lockstep::tool
