#include "base/live_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iomanip>
#include <memory>
#include <optional>
#include <string_view>

#include <lockstep/error.h>

#include "base/file_descriptor.h"
#include "base/private_files.h"
#include "base/text.h"

namespace lockstep {
namespace {

std::string why(const char* call, const std::string& path, int error) {
  return text(call, " ", path, ": ", std::strerror(error));
}

/// Writes all bytes to a new or an existing file.
std::string write_live_file(const std::string& path, int flags, bool replaces, std::string_view bytes) {
  FileDescriptor file;
  try {
    file = open_own_file(path, O_WRONLY | flags);
  } catch (const Error& error) {
    return error.what();
  }
  if (!file.is_open()) return why("open", path, ENOENT);
  if (replaces && ::ftruncate(file.get(), 0) != 0) return why("truncate", path, errno);
  while (!bytes.empty()) {
    const ssize_t put = ::write(file.get(), bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return why("write", path, put < 0 ? errno : ENOSPC);
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return "";
}

/// The number in a name such as "rank-00003.json"; none for other names.
std::optional<int> number_in(std::string_view name, std::string_view beginning, std::string_view ending) {
  if (!name.starts_with(beginning) || !name.ends_with(ending) || name.size() <= beginning.size() + ending.size())
    return std::nullopt;
  return parse_number<int>(name.substr(beginning.size(), name.size() - beginning.size() - ending.size()));
}

bool is_stale(std::string_view name, const LiveParticipants& participants) {
  if (name.starts_with('.') && name.ends_with(".new")) name = name.substr(1, name.size() - 5);  // being written
  if (const auto rank = number_in(name, "rank-", ".json")) return *rank >= participants.ranks;
  if (const auto rank = number_in(name, "output-", ".log")) return *rank >= participants.outputs;
  if (const auto node = number_in(name, "node-", ".json")) return *node >= participants.nodes;
  return false;
}

}  // namespace

std::string live_folder(const std::string& run_folder) {
  return run_folder + "/live";
}

std::string live_rank_file(int rank) {
  return text("rank-", std::setw(5), std::setfill('0'), rank, ".json");
}

std::string live_node_file(int node) {
  return text("node-", std::setw(3), std::setfill('0'), node, ".json");
}

std::string live_output_file(int rank) {
  return text("output-", std::setw(5), std::setfill('0'), rank, ".log");
}

std::string make_live_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0777) == 0 || errno == EEXIST) return "";
  return why("mkdir", folder, errno);
}

std::string replace_live_file(const std::string& folder, const std::string& name, const std::string& content) {
  const auto path = text(folder, "/", name), temporary = text(folder, "/.", name, ".new");
  auto failure = write_live_file(temporary, O_CREAT, /*replaces=*/true, content);
  if (failure.empty() && ::rename(temporary.c_str(), path.c_str()) != 0) failure = why("rename", path, errno);
  if (!failure.empty()) ::unlink(temporary.c_str());
  return failure;
}

std::string append_live_file(const std::string& folder, const std::string& name, const std::string& content) {
  return write_live_file(text(folder, "/", name), O_APPEND, /*replaces=*/false, content);
}

void remove_stale_live_files(const std::string& folder, const LiveParticipants& participants) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::opendir(folder.c_str()), &::closedir);
  if (!listing) return;
  while (const auto* entry = ::readdir(listing.get()))
    if (is_stale(entry->d_name, participants)) ::unlink(text(folder, "/", entry->d_name).c_str());
}

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace lockstep
