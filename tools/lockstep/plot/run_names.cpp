#include "plot/run_names.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "cli/svg.h"

namespace lockstep::plot {
namespace {

/// The parts of the absolute path, the last one first.
std::vector<std::string> parts_of(const std::string& path) {
  auto full = std::filesystem::absolute(path).lexically_normal();
  if (!full.has_filename()) full = full.parent_path();  // "runs/a/"
  if (full.filename() == "metrics.jsonl") full = full.parent_path();
  std::vector<std::string> parts;
  for (const auto& part : full.relative_path()) parts.insert(parts.begin(), part.string());
  if (parts.empty()) parts.push_back(full.string());  // the root
  return parts;
}

/// "b/c" for two of the parts {"c", "b", "a"}.
std::string joined_parts(const std::vector<std::string>& parts, size_t count) {
  std::string name = parts[0];
  for (size_t i = 1; i < std::min(count, parts.size()); ++i) name = parts[i] + "/" + name;
  return name;
}

size_t longest_of(const std::vector<std::string>& names) {
  size_t longest = 0;
  for (const auto& name : names) longest = std::max(longest, svg::letters_of(name).size());
  return longest;
}

/// Whether the separator is the sign of a number such as 1e-4.
bool is_exponent(const std::string& text, size_t at) {
  return text[at] == '-' && at >= 2 && text[at - 1] == 'e' && text[at - 2] >= '0' && text[at - 2] <= '9';
}

/// The length of the text that all names begin with, up to the end of a word.
size_t common_length(const std::vector<std::string>& names) {
  constexpr const char* kSeparators = "-_/, =";
  auto common = names[0];
  for (const auto& name : names)
    common.resize(static_cast<size_t>(std::mismatch(common.begin(), common.end(), name.begin(), name.end()).first -
                                      common.begin()));
  size_t end = common.find_last_of(kSeparators);
  while (end != std::string::npos && end > 0 && is_exponent(common, end))
    end = common.find_last_of(kSeparators, end - 1);
  return end + 1;  // 0 if there is none
}

/// The names without the text that all names begin with, except for its first letters.
std::vector<std::string> without_common_middle(std::vector<std::string> names) {
  constexpr size_t kKept = 8;
  const size_t length = names.size() > 1 ? common_length(names) : 0;
  for (auto& name : names) {
    const auto letters = svg::letters_of(name.substr(0, length));
    if (letters.size() <= kKept + 2) continue;
    std::string beginning;
    for (size_t i = 0; i < kKept; ++i) beginning += letters[i];
    name = beginning + "\u2026" + name.substr(length);
  }
  return names;
}

size_t count_distinct(const std::vector<std::string>& names) {
  return std::set<std::string>(names.begin(), names.end()).size();
}

}  // namespace

std::vector<std::string> names_of_runs(const std::vector<std::string>& paths) {
  std::vector<std::vector<std::string>> parts;
  size_t most_parts = 0;
  for (const auto& path : paths) {
    parts.push_back(parts_of(path));
    most_parts = std::max(most_parts, parts.back().size());
  }
  std::vector<size_t> counts(paths.size(), 1);
  std::vector<std::string> names(paths.size());
  for (size_t round = 0; round < most_parts; ++round) {
    std::map<std::string, int> uses;
    for (size_t i = 0; i < paths.size(); ++i) ++uses[names[i] = joined_parts(parts[i], counts[i])];
    for (size_t i = 0; i < paths.size(); ++i) counts[i] += uses[names[i]] > 1 ? 1 : 0;
  }
  return names;
}

std::string shortened(const std::string& name, size_t most_letters) {
  const auto letters = svg::letters_of(name);
  if (letters.size() <= most_letters) return name;
  const size_t last = (most_letters - 1) / 2, first = most_letters - 1 - last;
  std::string text;
  for (size_t i = 0; i < first; ++i) text += letters[i];
  text += "\u2026";
  for (size_t i = letters.size() - last; i < letters.size(); ++i) text += letters[i];
  return text;
}

std::vector<std::string> shortened_distinctly(const std::vector<std::string>& full_names, size_t most_letters) {
  if (longest_of(full_names) <= most_letters) return full_names;
  const auto names = without_common_middle(full_names);
  const auto longest = longest_of(names);
  for (;; ++most_letters) {
    std::vector<std::string> shorter;
    for (const auto& name : names) shorter.push_back(shortened(name, most_letters));
    if (most_letters >= longest || count_distinct(shorter) == count_distinct(names)) return shorter;
  }
}

}  // namespace lockstep::plot
