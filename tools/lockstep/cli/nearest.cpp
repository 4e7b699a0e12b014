#include "cli/nearest.h"

#include <algorithm>
#include <numeric>

namespace {

/// How many letters must be added, removed or exchanged to make one of the other.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t exchanged = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({exchanged, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest(const std::string& written, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, written.size() / 3) + 1;
  for (const auto& candidate : known) {
    const bool begins = written.size() > 3 && candidate.starts_with(written);
    const size_t found = begins ? 0 : distance(written, candidate);
    if (found >= best_distance) continue;
    best = candidate;
    best_distance = found;
  }
  return best;
}

std::string suggestion(const std::string& written, const std::vector<std::string>& known) {
  const auto found = nearest(written, known);
  return found.empty() ? "" : " Did you mean " + found + "?";
}
