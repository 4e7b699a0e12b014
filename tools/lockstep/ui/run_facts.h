#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace lockstep::ui {

/// What a small file of a run says, read again when the file has changed.
class JsonFile {
 public:
  explicit JsonFile(std::filesystem::path path) : path_(std::move(path)) {}

  /// Reads the file if it has changed. Returns whether the value or the problem has changed.
  bool read_again();

  /// The scalars of the object, and of the objects in it one level deep; null without a valid file.
  const nlohmann::json& value() const { return value_; }
  /// Why the file cannot be used; empty if it can be, or does not exist.
  const std::string& problem() const { return problem_; }

 private:
  bool set(nlohmann::json value, const std::string& problem);

  const std::filesystem::path path_;
  std::string stamp_;  // of the file that was read: number, size and time
  nlohmann::json value_;
  std::string problem_;
};

/// Size, number and time of change of a file; empty if it does not exist.
std::string stamp_of(const std::filesystem::path& path);

/// The time of the last change, Unix seconds; 0 if the file does not exist.
double changed_at(const std::filesystem::path& path);

}  // namespace lockstep::ui
