#include "doctor/checks.h"

#include <fmt/format.h>

namespace lockstep::tool {
namespace {

constexpr size_t kSecretBytes = 32;

std::string how_to_create(const std::string& path) {
  return fmt::format("(umask 077 && head -c {} /dev/urandom > {}), and the same file on every host", kSecretBytes,
                     path);
}

/// Why joining would refuse the file; ok when it would not.
Finding check_secret_file(const SecretFile& secret) {
  Finding finding{"secret", Status::kError, "", ""};
  const auto& path = secret.path;
  if (!secret.is_regular) {
    finding.found = fmt::format("{} is not a regular file", path);
    finding.remedy = "put the secret into a file: " + how_to_create("job.secret");
  } else if (!secret.has_trusted_owner) {
    finding.found = fmt::format("{} belongs to another user, who could be part of the job", path);
    finding.remedy = "use a file of your own: " + how_to_create("job.secret");
  } else if ((secret.mode & 077) != 0) {
    finding.found = fmt::format("{} has mode {:04o}, so others than its owner can use it", path, secret.mode);
    finding.remedy = fmt::format("chmod 600 {}", path);
  } else if (!secret.failure.empty()) {
    finding.found = fmt::format("{} cannot be read: {}", path, secret.failure);
    finding.remedy = fmt::format("chmod 600 {}, as its owner", path);
  } else if (secret.bytes < kSecretBytes) {
    finding.found = fmt::format("{} has {} bytes, a secret at least {}", path, secret.bytes, kSecretBytes);
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
    return {"launcher", Status::kError, rendezvous.refusal,
            "let the launcher set its variables (lockstep run does), or set them as docs/environment.md says"};
  if (job.source == Environment::kSingleProcess)
    return {"launcher", Status::kOk, "none: a program started from here is one process"};
  return {"launcher", Status::kOk,
          fmt::format("{}: rank {} of {}, {} of them on this host", job.source, job.rank, job.world_size,
                      job.local_world_size)};
}

Finding check_secret(const SecretFile& secret, const Rendezvous& rendezvous, const Network& network) {
  if (secret.is_named && !secret.exists)
    return {"secret", Status::kError, fmt::format("LOCKSTEP_SECRET_FILE names {}, which is not there", secret.path),
            "to create it: " + how_to_create(secret.path)};
  if (secret.is_named) return check_secret_file(secret);
  if (rendezvous.kind == Rendezvous::Kind::kFile)
    return {"secret", Status::kOk, "not needed: ranks that meet in a file find one there"};
  if (is_beyond_loopback(rendezvous, network))
    return {"secret", Status::kError,
            "LOCKSTEP_SECRET_FILE is not set, and beyond loopback ranks refuse to join without",
            how_to_create("job.secret") + "; then set LOCKSTEP_SECRET_FILE to its path"};
  if (!secret.exists)
    return {"secret", Status::kOk,
            fmt::format("not needed on loopback: {} is made when it is first used", secret.path)};
  return check_secret_file(secret);
}

Finding check_folder(const Folder& folder) {
  constexpr uint64_t kScarceBytes = uint64_t{256} << 20;
  const std::string elsewhere =
      fmt::format("name another one with {}", folder.source.empty() ? "TMPDIR" : folder.source);
  Finding finding{folder.purpose, Status::kOk,
                  fmt::format("{}, {} free", folder.path, format_bytes(folder.space.free_bytes))};
  if (!folder.failure.empty()) {
    // Training goes on without the flight recorder, which is only missed when something else has failed.
    finding.status = folder.purpose == kFlightRecorder ? Status::kWarning : Status::kError;
    finding.found = fmt::format("{} cannot be written: {}", folder.path, folder.failure);
    finding.remedy =
        fmt::format("{} {}, or {}", folder.exists ? "get the right to write to" : "mkdir -p", folder.path, elsewhere);
  } else if (folder.space.free_bytes < kScarceBytes) {
    finding.status = Status::kWarning;
    finding.remedy = "make room there, or " + elsewhere;
  }
  return finding;
}

}  // namespace lockstep::tool
