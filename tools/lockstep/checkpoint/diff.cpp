#include <algorithm>
#include <cmath>
#include <iostream>
#include <iterator>
#include <map>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/error.h>

#include "checkpoint/element_budget.h"
#include "checkpoint/entries.h"
#include "checkpoint/operations.h"
#include "checkpoint/statistics.h"
#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

using Kind = Value::Kind;
using nlohmann::ordered_json;

/// An entry that differs between the files, or that only one file has.
struct Finding {
  std::string path;
  std::string what;  // "only in A", "only in B", "kind", "shape", "dtype", "values", "value"
  std::string a{}, b{};
  std::optional<Difference> difference{};  // of tensors with different values
  int64_t elements = 0;
};

constexpr const char* kRemedy =
    "'lockstep checkpoint convert --key NAME' writes one entry of a file, to be compared alone";

/// The leaves, ordered by path.
Leaves by_path(const std::string& file, const Value& value) {
  PathBudget budget(file, kRemedy);
  auto leaves = leaves_of(value, budget);
  std::sort(leaves.all.begin(), leaves.all.end(), [](const Leaf& a, const Leaf& b) { return a.path < b.path; });
  const auto twice = std::adjacent_find(leaves.all.begin(), leaves.all.end(),
                                        [](const Leaf& a, const Leaf& b) { return a.path == b.path; });
  if (twice != leaves.all.end())
    throw UsageError(
        fmt::format("{}: two entries have the path '{}', so they cannot be compared by path", file, twice->path));
  return leaves;
}

/// Compares the elements of tensors. Compares equal views of the same storages once.
class Comparison {
 public:
  Comparison(const std::string& files, const std::vector<NamedTensor>& tensors, double tolerance)
      : budget_(files, tensors, kRemedy), tolerance_(tolerance) {}

  Difference operator()(const std::string& path, const at::Tensor& a, const at::Tensor& b) {
    const std::pair views{view_of(a), view_of(b)};
    if (const auto found = known_.find(views); found != known_.end()) return found->second;
    budget_.spend({path, a}, bytes_without_repetitions({a, b}));
    return known_[views] = compare(a, b, tolerance_);
  }
  double tolerance() const { return tolerance_; }

 private:
  ElementBudget budget_;
  const double tolerance_;
  std::map<std::pair<View, View>, Difference> known_;
};

bool is_number(const Value& value) {
  return value.is(Kind::kFloat) || value.is(Kind::kInt) || value.is(Kind::kBool);
}

std::string type_text(const at::Tensor& tensor) {
  return fmt::format("{} {}", python_name(tensor.scalar_type()), shape_text(tensor));
}

std::optional<Finding> compare_tensors(const std::string& path, const at::Tensor& a, const at::Tensor& b,
                                       Comparison& compare_elements) {
  if (a.sizes() != b.sizes()) return Finding{path, "shape", type_text(a), type_text(b)};
  if (a.scalar_type() != b.scalar_type()) return Finding{path, "dtype", type_text(a), type_text(b)};
  const auto difference = compare_elements(path, a, b);
  if (difference.count == 0) return std::nullopt;
  Finding finding{path, "values"};
  finding.difference = difference;
  finding.elements = a.numel();
  return finding;
}

std::optional<Finding> compare_values(const std::string& path, const Value& a, const Value& b,
                                      Comparison& compare_elements) {
  if (a.is(Kind::kTensor) && b.is(Kind::kTensor))
    return compare_tensors(path, a.tensor(), b.tensor(), compare_elements);
  if (a.kind() != b.kind()) return Finding{path, "kind", a.to_string(60), b.to_string(60)};
  if (a == b) return std::nullopt;
  if (is_number(a) && is_number(b)) {
    const double x = a.as_double(), y = b.as_double(), tolerance = compare_elements.tolerance();
    if ((std::isnan(x) && std::isnan(y)) || (tolerance > 0 && std::abs(x - y) <= tolerance)) return std::nullopt;
  }
  return Finding{path, "value", a.to_string(60), b.to_string(60)};
}

struct Result {
  std::vector<Finding> findings{};
  size_t compared = 0, tensors = 0;  // entries of both files, and how many of them are tensors
};

Result compare_entries(const Leaves& a, const Leaves& b, const Arguments& arguments) {
  std::vector<NamedTensor> tensors;
  for (const auto* leaves : {&a, &b})
    for (const auto& [path, value] : leaves->all)
      if (value->is(Kind::kTensor)) tensors.push_back({"", value->tensor()});
  Comparison compare_elements(arguments.first + " and " + arguments.second, tensors, arguments.tolerance);
  Result result;
  auto left = a.all.begin(), right = b.all.begin();
  std::vector<Finding> only_in_b;
  while (left != a.all.end() || right != b.all.end()) {
    if (right == b.all.end() || (left != a.all.end() && left->path < right->path)) {
      result.findings.push_back({left->path, "only in A", left->value->to_string(60)});
      ++left;
    } else if (left == a.all.end() || right->path < left->path) {
      only_in_b.push_back({right->path, "only in B", "", right->value->to_string(60)});
      ++right;
    } else {
      ++result.compared;
      if (left->value->is(Kind::kTensor)) ++result.tensors;
      if (auto finding = compare_values(left->path, *left->value, *right->value, compare_elements))
        result.findings.push_back(std::move(*finding));
      ++left;
      ++right;
    }
  }
  std::move(only_in_b.begin(), only_in_b.end(), std::back_inserter(result.findings));
  return result;
}

std::string details_of(const Finding& finding) {
  if (finding.difference)
    return fmt::format("max abs {:.3g}, max rel {:.3g}, in {} of {}", finding.difference->max_absolute,
                       finding.difference->max_relative, finding.difference->count,
                       counted(static_cast<uint64_t>(finding.elements), "element"));
  if (finding.a.empty() || finding.b.empty()) return finding.a + finding.b;
  return finding.a + " / " + finding.b;
}

void print_result(const Arguments& arguments, const Result& result) {
  const auto style = output_style();
  Table table({{"ENTRY", false, true}, {"DIFFERENCE"}, {"A / B", false, true}});
  for (const auto& finding : result.findings)
    table.add({finding.path.empty() ? "value" : finding.path, finding.what, details_of(finding)});
  if (!table.is_empty()) {
    std::cout << fmt::format("A: {}\nB: {}\n\n", printable(arguments.first), printable(arguments.second))
              << table.text(style) << "\n";
  }
  const auto both = fmt::format("{} in both files, {}", counted(result.compared, "entry"),
                                counted(result.tensors, "tensor") + " among them");
  std::cout << (result.findings.empty() ? fmt::format("equal: {}\n", both)
                                        : fmt::format("{}; {}\n", counted(result.findings.size(), "difference"), both))
            << std::flush;
}

void print_result_json(const Arguments& arguments, const Result& result) {
  ordered_json object{{"a", arguments.first},
                      {"b", arguments.second},
                      {"equal", result.findings.empty()},
                      {"compared", result.compared},
                      {"differences", ordered_json::array()}};
  for (const auto& finding : result.findings) {
    ordered_json entry{{"entry", finding.path}, {"difference", finding.what}};
    if (!finding.a.empty()) entry["a"] = finding.a;
    if (!finding.b.empty()) entry["b"] = finding.b;
    if (finding.difference) {
      entry["max_absolute"] = finding.difference->max_absolute;
      entry["max_relative"] = finding.difference->max_relative;
      entry["elements"] = finding.difference->count;
    }
    object["differences"].push_back(std::move(entry));
  }
  print_json(object);
}

}  // namespace

int run_diff(const Arguments& arguments) {
  const auto a = load_whole(arguments.first), b = load_whole(arguments.second);
  const auto result = compare_entries(by_path(arguments.first, a), by_path(arguments.second, b), arguments);
  arguments.json ? print_result_json(arguments, result) : print_result(arguments, result);
  return result.findings.empty() ? 0 : 1;
}

}  // namespace lockstep::checkpoint
