#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <map>
#include <set>

#include <c10/core/DeviceType.h>
#include <fmt/format.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "checkpoint/entries.h"
#include "checkpoint/listing.h"
#include "checkpoint/operations.h"
#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr const char* kBest = "best.pt";

/// The names of the shards that best.pt lists. Throws if best.pt cannot be read: the shards that it needs must not be
/// removed.
std::set<std::string> shards_of_best(const Folder& folder) {
  std::set<std::string> names;
  for (const auto& file : folder.files) {
    if (file.name != kBest) continue;
    try {
      const auto value = load_checkpoint(file.path, {.map_location = c10::kMeta});
      for (const auto& listed : shards_of(value)) names.insert(listed.file);
    } catch (const CheckpointError& error) {
      throw CheckpointError(
          fmt::format("{}; nothing was removed, because the shards that {} needs are not known: "
                      "repair or remove {}",
                      error.what(), kBest, kBest));
    }
  }
  return names;
}

/// Whether the file must stay whatever its number: best.pt or another link refers to it, or best.pt needs its shards.
bool is_protected(const CheckpointFile& file, const Folder& folder, const std::set<std::string>& best_shards) {
  const auto is_link_to_it = [&](const CheckpointFile& other) {
    return other.path != file.path && (other.is_link() || other.name == kBest) && other.is_same_file(file);
  };
  const auto is_needed = [&](const CheckpointFile& shard) { return best_shards.contains(shard.name); };
  return file.is_link() || std::any_of(folder.files.begin(), folder.files.end(), is_link_to_it) ||
         std::any_of(file.shards.begin(), file.shards.end(), is_needed);
}

/// Whether CheckpointDirectory has written the file. A file of another unit than steps and epochs might only have a
/// name of this form, such as a date: it must have the number as an entry.
bool is_checkpoint(const CheckpointFile& file) {
  if (!file.numbered) return false;
  const auto& [unit, number] = *file.numbered;
  if (unit == "step" || unit == "epoch") return true;
  try {
    const auto value = load_checkpoint(file.path, {.map_location = c10::kMeta});
    const auto* entry = find_entry(value, unit.c_str());
    return entry && *entry == Value(number);
  } catch (const Error&) {
    return false;
  }
}

/// Locks the folder as CheckpointDirectory does, until this program ends. A folder that no job has used needs no
/// lock. Throws UsageError, which names the job, if a job uses the folder.
void lock_folder(const std::string& folder) {
  const auto path = folder + "/.lock";
  const int file = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0 && errno == ENOENT) return;
  if (file >= 0 && ::flock(file, LOCK_EX | LOCK_NB) == 0) return;
  if (errno != EWOULDBLOCK) throw SystemError(fmt::format("{}: cannot be locked: {}", path, std::strerror(errno)));
  std::string owner(512, '\0');
  owner.resize(static_cast<size_t>(std::max<ssize_t>(0, ::pread(file, owner.data(), owner.size(), 0))));
  throw UsageError(
      fmt::format("{}: in use by {}; nothing was removed. Let the job remove old checkpoints (keep_last, "
                  "keep_every), or wait until it has ended",
                  folder, printable(owner)));
}

struct Plan {
  std::vector<CheckpointFile> removed{};
  std::vector<CheckpointFile> kept{};  // with a number
};

/// Whether a file is intact, so that older files may be removed. Reads the whole file.
bool is_intact(const CheckpointFile& file) {
  try {
    return verify_checkpoint(file.path).damage.empty();
  } catch (const Error&) {
    return false;
  }
}

/// Decides by number, separately for each unit. Damaged files stay and do not count.
Plan plan_prune(const Folder& folder, const std::set<std::string>& best_shards, const Arguments& arguments) {
  std::map<std::string, int64_t> newer;  // number of files, links excluded, with a higher number, by unit
  Plan plan;
  for (auto file = folder.files.rbegin(); file != folder.files.rend(); ++file) {  // the highest number first
    if (!is_checkpoint(*file)) continue;
    const auto [unit, number] = *file->numbered;
    const bool is_last = newer[unit] < arguments.keep_last;
    if (is_last && !file->is_link() && is_intact(*file)) ++newer[unit];
    const bool is_multiple = arguments.keep_every > 0 && number % arguments.keep_every == 0;
    const bool stays = is_last || is_multiple || is_protected(*file, folder, best_shards);
    (stays ? plan.kept : plan.removed).push_back(*file);
  }
  std::reverse(plan.removed.begin(), plan.removed.end());
  std::reverse(plan.kept.begin(), plan.kept.end());
  return plan;
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    throw SystemError(
        fmt::format("{}: cannot be removed: {}; check the permissions of its folder", path, std::strerror(errno)));
}

/// Removes the main file first: shards without a main file are not mistaken for a checkpoint.
void remove_checkpoint(const CheckpointFile& file) {
  remove_file(file.path);
  for (const auto& shard : file.shards) remove_file(shard.path);
}

void print_removed(const CheckpointFile& file, const Arguments& arguments) {
  auto text = fmt::format("{} {}  {}", arguments.dry_run ? "would remove" : "removed", printable(file.path),
                          human_bytes(file.bytes_with_shards()));
  if (!file.shards.empty()) text += ", with " + counted(file.shards.size(), "shard");
  std::cout << text << std::endl;
}

void print_summary(const Plan& plan, uint64_t freed, const Arguments& arguments) {
  if (arguments.json) {
    ordered_json object{
        {"folder", arguments.first}, {"dry_run", arguments.dry_run}, {"removed", ordered_json::array()}};
    for (const auto& file : plan.removed)
      object["removed"].push_back(
          {{"file", file.name}, {"bytes", file.bytes_with_shards()}, {"shards", file.shards.size()}});
    object["kept"] = ordered_json::array();
    for (const auto& file : plan.kept) object["kept"].push_back(file.name);
    object["freed_bytes"] = freed;
    print_json(object);
    return;
  }
  std::cout << fmt::format("{} {}, {} {}; {} kept\n", counted(plan.removed.size(), "checkpoint"),
                           arguments.dry_run ? "would be removed" : "removed", human_bytes(freed),
                           arguments.dry_run ? "would be freed" : "freed", plan.kept.size())
            << std::flush;
}

}  // namespace

int run_prune(const Arguments& arguments) {
  if (!arguments.dry_run) lock_folder(arguments.first);
  const auto folder = list_folder(arguments.first);
  const auto plan = plan_prune(folder, shards_of_best(folder), arguments);
  uint64_t freed = 0;
  for (const auto& file : plan.removed) {
    if (!arguments.dry_run) remove_checkpoint(file);
    if (!arguments.json) print_removed(file, arguments);
    freed += file.bytes_with_shards();
  }
  print_summary(plan, freed, arguments);
  if (!folder.orphans.empty())
    std::cerr << fmt::format("note: {} without a main file were left alone, such as {}\n",
                             counted(folder.orphans.size(), "shard file"), printable(folder.orphans[0].path));
  return 0;
}

}  // namespace lockstep::checkpoint
