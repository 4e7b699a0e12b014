#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "live/run_folder.h"

namespace lockstep::ui {

/// The content of a small JSON file of a run, read again when the file has changed.
class JsonFile {
 public:
  explicit JsonFile(std::string name) : name_(std::move(name)) {}

  /// Reads the file if it has changed. Returns whether the value or the problem has changed.
  bool read_again(const live::RunFolder& run);

  /// The scalars of the object, and of the objects in it one level deep; null without a valid file.
  const nlohmann::json& value() const { return value_; }
  /// Why the file cannot be used; empty if it can be used, or does not exist.
  const std::string& problem() const { return problem_; }

 private:
  nlohmann::json parsed(const live::RunFolder& run) const;

  const std::string name_;
  std::string stamp_;  // of the file that was read: number, size and time
  nlohmann::json value_;
  std::string problem_;
};

/// Size, number and time of change of a file or folder of a run; empty if it does not exist.
std::string stamp_of(const live::RunFolder& run, const std::string& name);

/// The time of the last change, Unix seconds; 0 if the file does not exist.
double changed_at(const live::RunFolder& run, const std::string& name);

}  // namespace lockstep::ui
