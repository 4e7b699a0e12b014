#pragma once

#include <string>
#include <vector>

namespace lockstep::tool {

/// kWarning: training works, slower or with less safety than it could. kError: it will not work as it is set up.
enum class Status { kOk, kWarning, kError };

/// What one check of `lockstep doctor` says. A remedy stands with everything that is not ok; with ok it is advice.
struct Finding {
  std::string check;
  Status status = Status::kOk;
  std::string found;
  std::string remedy{};

  bool operator==(const Finding&) const = default;
};

/// Findings about one subject.
struct Section {
  std::string title;
  std::vector<Finding> findings;
};

inline const char* name_of(Status status) {
  if (status == Status::kOk) return "ok";
  return status == Status::kWarning ? "warning" : "error";
}

}  // namespace lockstep::tool
