#include "ui/run_facts.h"

#include <sys/stat.h>

#include <fstream>

#include <fmt/format.h>

namespace lockstep::ui {
namespace {

using Json = nlohmann::json;

constexpr off_t kLargestFile = off_t{1} << 20;

/// The scalars of an object; of nested objects their scalars. Deeper values are left out: a file of strangers must not
/// make a deep tree.
Json without_depth(const Json& object, int levels) {
  Json result = Json::object();
  for (const auto& [key, value] : object.items()) {
    if (value.is_primitive())
      result[key] = value;
    else if (value.is_object() && levels > 0)
      result[key] = without_depth(value, levels - 1);
  }
  return result;
}

}  // namespace

std::string stamp_of(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return "";
  return fmt::format("{}:{}:{}.{}", status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
}

double changed_at(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return 0;
  return static_cast<double>(status.st_mtim.tv_sec) + static_cast<double>(status.st_mtim.tv_nsec) * 1e-9;
}

bool JsonFile::set(Json value, const std::string& problem) {
  const bool has_changed = value != value_ || problem != problem_;
  value_ = std::move(value);
  problem_ = problem;
  return has_changed;
}

bool JsonFile::read_again() {
  const auto stamp = stamp_of(path_);
  if (stamp == stamp_) return false;
  stamp_ = stamp;
  const auto name = path_.filename().string();
  struct stat status {};
  if (stamp.empty() || ::stat(path_.c_str(), &status) != 0) return set(nullptr, "");
  if (!S_ISREG(status.st_mode)) return set(nullptr, name + " is no regular file");
  if (status.st_size > kLargestFile) return set(nullptr, name + " is larger than 1 MiB");
  std::ifstream file(path_, std::ios::binary);
  if (!file) return set(nullptr, name + " cannot be read");
  const auto parsed = Json::parse(file, nullptr, false);
  if (!parsed.is_object()) return set(nullptr, name + " is damaged: it is no JSON object");
  return set(without_depth(parsed, 1), "");
}

}  // namespace lockstep::ui
