#include "ui/run_facts.h"

#include <utility>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "live/file_text.h"

namespace lockstep::ui {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxFile = size_t{1} << 20;

/// The scalars of an object, and of nested objects their scalars. Deeper values are left out: an untrusted file must
/// not result in a deep tree.
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

std::string stamp_of(const live::RunFolder& run, const std::string& name) {
  const auto status = run.status(name);
  if (!status) return "";
  return fmt::format("{}:{}:{}.{}", status->st_ino, status->st_size, status->st_mtim.tv_sec, status->st_mtim.tv_nsec);
}

double changed_at(const live::RunFolder& run, const std::string& name) {
  const auto status = run.status(name);
  return status ? live::modified_at(*status) : 0;
}

/// Throws Error with the reason if the file cannot be used.
Json JsonFile::parsed(const live::RunFolder& run) const {
  const auto bytes = live::read_bytes(run, name_, kMaxFile);
  if (!bytes) return nullptr;
  const auto value = Json::parse(*bytes, nullptr, false);
  if (!value.is_object()) throw Error("it is damaged: it is no JSON object");
  return without_depth(value, 1);
}

bool JsonFile::read_again(const live::RunFolder& run) {
  const auto stamp = stamp_of(run, name_);
  if (stamp == stamp_) return false;
  stamp_ = stamp;
  const auto value_before = std::exchange(value_, nullptr);
  const auto problem_before = std::exchange(problem_, "");
  try {
    value_ = parsed(run);
  } catch (const Error& error) {
    problem_ = fmt::format("{}: {}", name_, error.what());
  }
  return value_ != value_before || problem_ != problem_before;
}

}  // namespace lockstep::ui
