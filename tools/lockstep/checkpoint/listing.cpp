#include "checkpoint/listing.h"

#include <dirent.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <regex>
#include <tuple>

#include <fmt/format.h>

#include <lockstep/error.h>

namespace lockstep::checkpoint {
namespace {

bool has_checkpoint_extension(const std::string& name) {
  return name.ends_with(".pt") || name.ends_with(".pth") || name.ends_with(".safetensors");
}

std::vector<std::string> names_in(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(::opendir(folder.c_str()), ::closedir);
  if (!opened) throw SystemError(fmt::format("{}: cannot be read: {}", folder, std::strerror(errno)));
  std::vector<std::string> names;
  while (const auto* entry = ::readdir(opened.get())) names.emplace_back(entry->d_name);
  std::sort(names.begin(), names.end());
  return names;
}

/// None if the file does not exist or is not a plain file, after links are followed.
std::optional<CheckpointFile> file_at(const std::string& path) {
  struct stat followed {};
  if (::stat(path.c_str(), &followed) != 0 || !S_ISREG(followed.st_mode)) return std::nullopt;
  CheckpointFile file;
  file.path = path;
  file.name = path.substr(path.rfind('/') + 1);
  file.numbered = parse_name(file.name);
  file.bytes = static_cast<uint64_t>(followed.st_size);
  file.modified = followed.st_mtime;
  char target[PATH_MAX];
  if (const auto size = ::readlink(path.c_str(), target, sizeof target); size > 0)
    file.link_target.assign(target, static_cast<size_t>(size));
  file.device = followed.st_dev;
  file.inode = followed.st_ino;
  return file;
}

std::string join(const std::string& folder, const std::string& name) {
  return folder.ends_with('/') ? folder + name : folder + "/" + name;
}

/// Files without a number come last.
auto sort_key(const CheckpointFile& file) {
  return std::tuple(!file.numbered, file.numbered ? file.numbered->unit : "", file.numbered ? file.numbered->number : 0,
                    file.name);
}

}  // namespace

std::optional<Numbered> parse_name(const std::string& name) {
  static const std::regex kName("(.+)-([0-9]{8}|[1-9][0-9]{8,17})\\.pt");
  std::smatch parts;
  if (!std::regex_match(name, parts, kName)) return std::nullopt;
  return Numbered{parts[1], std::stoll(parts[2])};
}

std::string main_of_shard(const std::string& name) {
  static const std::regex kName("(.+)\\.shard-[0-9]+-of-[0-9]+(-[0-9a-f]+)?\\.pt");
  std::smatch parts;
  return std::regex_match(name, parts, kName) ? parts[1].str() + ".pt" : "";
}

uint64_t CheckpointFile::bytes_with_shards() const {
  uint64_t sum = bytes;
  for (const auto& shard : shards) sum += shard.bytes;
  return sum;
}

bool is_folder(const std::string& path) {
  struct stat found {};
  return ::stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

bool is_file(const std::string& path) {
  return file_at(path).has_value();
}

Folder list_folder(const std::string& path) {
  if (!is_folder(path)) throw UsageError(fmt::format("{}: no such folder", path));
  Folder folder;
  std::map<std::string, std::vector<CheckpointFile>> shards_of;
  for (const auto& name : names_in(path)) {
    if (!has_checkpoint_extension(name)) continue;
    const auto file = file_at(join(path, name));
    if (!file) continue;
    if (const auto main = main_of_shard(name); !main.empty())
      shards_of[main].push_back(*file);
    else
      folder.files.push_back(*file);
  }
  for (auto& file : folder.files)
    if (auto shards = shards_of.extract(file.name)) file.shards = std::move(shards.mapped());
  for (const auto& [main, shards] : shards_of)
    folder.orphans.insert(folder.orphans.end(), shards.begin(), shards.end());
  std::sort(folder.files.begin(), folder.files.end(),
            [](const CheckpointFile& a, const CheckpointFile& b) { return sort_key(a) < sort_key(b); });
  return folder;
}

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

std::vector<CheckpointFile> find_files(const std::vector<std::string>& paths) {
  std::vector<CheckpointFile> files;
  for (const auto& path : paths) {
    if (is_folder(path)) {
      const auto listed = list_folder(path).files;
      files.insert(files.end(), listed.begin(), listed.end());
      continue;
    }
    require_file(path);
    auto file = *file_at(path);
    if (main_of_shard(file.name).empty())
      for (const auto& other : list_folder(folder_of(path)).files)
        if (other.name == file.name) file.shards = other.shards;
    files.push_back(std::move(file));
  }
  return files;
}

CheckpointFile newest_in(const std::string& folder) {
  const auto checkpoints = join(folder, "checkpoints");
  std::vector<CheckpointFile> files;
  if (is_folder(checkpoints)) files = list_folder(checkpoints).files;
  if (files.empty()) files = list_folder(folder).files;
  std::map<std::string, CheckpointFile>
      last_of_unit;  // files are ordered by number; files without a number have unit ""
  for (const auto& file : files) {
    auto& last = last_of_unit[file.numbered ? file.numbered->unit : ""];
    if (file.numbered || file.modified >= last.modified) last = file;
  }
  if (last_of_unit.size() > 1) last_of_unit.erase("");
  if (last_of_unit.empty())
    throw UsageError(
        fmt::format("{}: has no checkpoint files, nor has {}; pass a checkpoint file, or the folder of a run", folder,
                    checkpoints));
  return std::max_element(last_of_unit.begin(), last_of_unit.end(),
                          [](const auto& a, const auto& b) { return a.second.modified < b.second.modified; })
      ->second;
}

void require_file(const std::string& path) {
  if (is_file(path)) return;
  if (is_folder(path)) throw UsageError(fmt::format("{}: is a folder, expected a checkpoint file in it", path));
  throw UsageError(fmt::format("{}: no such file; check the path", path));
}

}  // namespace lockstep::checkpoint
