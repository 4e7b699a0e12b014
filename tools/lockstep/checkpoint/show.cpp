#include <fnmatch.h>

#include <cmath>
#include <iostream>
#include <map>
#include <optional>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/error.h>

#include "checkpoint/element_budget.h"
#include "checkpoint/entries.h"
#include "checkpoint/listing.h"
#include "checkpoint/operations.h"
#include "checkpoint/statistics.h"
#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

using Kind = Value::Kind;
using nlohmann::ordered_json;

constexpr size_t kMaxLevels = 8;     // of the tree
constexpr size_t kMaxChildren = 20;  // of a value in the tree
constexpr size_t kMaxLine = 10000;   // characters of a value; shortened to the width of the output

Totals totals_of(const std::vector<NamedTensor>& tensors) {
  Totals totals;
  for (const auto& named : tensors) totals.add(named.tensor);
  return totals;
}

// --- the tree

/// Prints values, one per line, and the values in them below, indented. A value that fits on a line, or that has only
/// tensors, which the table lists, is printed on one line. The depth is limited: in a deep tree, each line would
/// consist mostly of its indentation.
class Tree {
 public:
  Tree(const Value& value, size_t columns) : contents_(value), columns_(columns) {}

  void print(const std::string& key, const Value& value, size_t depth) {
    const auto contents = contents_[value];
    const auto head = std::string(2 * depth, ' ') + printable(key) + ": ";
    if (contents.totals.tensors == 0) {
      const auto line = printable(value.to_string(is_container(value) ? columns_ + 1 : kMaxLine));
      const size_t room = columns_ > head.size() + 20 ? columns_ - head.size() : 20;
      if (!is_container(value) || head.size() + line.size() <= columns_) {
        text_ += head + shorten(line, room) + "\n";
        return;
      }
    }
    text_ += head + description(value, contents.totals) + "\n";
    if (is_container(value) && contents.has_others) print_children(value, depth + 1);
  }

  std::string take() { return std::move(text_); }

 private:
  static std::string description(const Value& value, const Totals& totals) {
    if (value.is(Kind::kTensor)) return value.to_string(80);
    std::string text = value.is(Kind::kObject) ? printable(value.type()) : name_of(value.kind());
    text += " of " + counted(value.size(), value.is(Kind::kDict) || value.is(Kind::kObject) ? "entry" : "element");
    if (totals.tensors > 0)
      text += fmt::format(", {}, {}", counted(totals.tensors, "tensor"), human_bytes(totals.bytes));
    return text;
  }

  void print_children(const Value& value, size_t depth) {
    size_t left = depth < kMaxLevels ? kMaxChildren : 0, more = 0;
    for_each_inside(value, [&](const std::string& key, const Value& inner) {
      if (left > 0)
        print(key, inner, depth), --left;
      else
        ++more;
    });
    if (more > 0) text_ += fmt::format("{}... {} more\n", std::string(2 * depth, ' '), more);
  }

  const ContentsOf contents_;
  const size_t columns_;
  std::string text_;
};

std::string tree_of(const Value& value, size_t columns) {
  Tree tree(value, columns);
  if (value.is(Kind::kDict))
    for (const auto& [key, item] : value.items()) tree.print(key_text(key), item, 0);
  else
    tree.print("value", value, 0);
  return tree.take();
}

// --- the tensors

std::string number_text(double number) {
  return fmt::format("{:.3g}", number == 0 ? 0 : number);  // no "-0"
}

/// The statistics of tensors of a file. Computes the statistics of equal views of one storage once.
class StatisticsOf {
 public:
  StatisticsOf(const std::string& file, const std::vector<NamedTensor>& tensors)
      : budget_(file, tensors, "select others with --tensor") {}

  std::optional<Statistics> operator[](const NamedTensor& named) {
    const auto view = view_of(named.tensor);
    if (const auto found = known_.find(view); found != known_.end()) return found->second;
    budget_.spend(named, bytes_without_repetitions({named.tensor}));
    return known_[view] = statistics_of(named.tensor);
  }

 private:
  ElementBudget budget_;
  std::map<View, std::optional<Statistics>> known_;
};

void add_row(Table& table, const NamedTensor& named, const std::optional<Statistics>& found) {
  const auto number = [&](double Statistics::*member) { return found ? number_text((*found).*member) : "-"; };
  const auto count = [&](int64_t Statistics::*member) { return found ? std::to_string((*found).*member) : "-"; };
  table.add({named.name.empty() ? "value" : named.name, shape_text(named.tensor),
             python_name(named.tensor.scalar_type()), human_bytes(bytes_of(named.tensor)), number(&Statistics::mean),
             number(&Statistics::norm), number(&Statistics::min), number(&Statistics::max),
             count(&Statistics::nan_count), count(&Statistics::inf_count)});
}

std::string table_of(const std::string& file, const std::vector<NamedTensor>& tensors, const Style& style) {
  Table table({{"TENSOR", false, true},
               {"SHAPE"},
               {"DTYPE"},
               {"SIZE", true},
               {"MEAN", true},
               {"NORM", true},
               {"MIN", true},
               {"MAX", true},
               {"NAN", true},
               {"INF", true}});
  StatisticsOf statistics(file, tensors);
  for (const auto& named : tensors) add_row(table, named, statistics[named]);
  return table.text(style);
}

ordered_json object_of(const NamedTensor& named, const std::optional<Statistics>& found) {
  const auto& tensor = named.tensor;
  ordered_json object{{"name", named.name},
                      {"shape", tensor.sizes().vec()},
                      {"dtype", python_name(tensor.scalar_type())},
                      {"bytes", bytes_of(tensor)}};
  const auto set = [&](const char* key, auto number) { object[key] = found ? ordered_json(number) : ordered_json(); };
  const auto values = found.value_or(Statistics{});
  set("mean", values.mean);
  set("norm", values.norm);
  set("min", values.min);
  set("max", values.max);
  set("nan", values.nan_count);
  set("inf", values.inf_count);
  return object;
}

std::vector<NamedTensor> matching(std::vector<NamedTensor> tensors, const std::string& glob) {
  if (!glob.empty())
    std::erase_if(tensors,
                  [&](const NamedTensor& named) { return ::fnmatch(glob.c_str(), named.name.c_str(), 0) != 0; });
  return tensors;
}

void print_show_json(const std::string& path, const Value& value, const std::vector<NamedTensor>& tensors) {
  const auto totals = totals_of(tensors);
  auto object = ordered_json::object();
  object.get_ref<ordered_json::object_t&>().reserve(5);  // to grow copies all entries
  object["file"] = path;
  object["value"] = to_json(value);
  object["tensors"] = ordered_json::array();
  StatisticsOf statistics(path, tensors);
  for (const auto& named : tensors) object["tensors"].push_back(object_of(named, statistics[named]));
  object["totals"] = {{"tensors", totals.tensors}, {"elements", totals.elements}, {"bytes", totals.bytes}};
  object["shared"] = overlapping(tensors);
  print_json(object);
}

std::string totals_line(const std::vector<NamedTensor>& tensors) {
  const auto totals = totals_of(tensors);
  size_t sharing = 0;
  for (const auto& group : overlapping(tensors)) sharing += group.size();
  auto text = fmt::format("{}, {}, {}", counted(totals.tensors, "tensor"), counted(totals.elements, "element"),
                          human_bytes(totals.bytes));
  if (sharing > 0) text += fmt::format("; {} of the tensors share memory", sharing);
  return text + "\n";
}

}  // namespace

int run_show(const Arguments& arguments) {
  const bool chooses = is_folder(arguments.first);
  const auto path = chooses ? newest_in(arguments.first).path : arguments.first;
  const auto value = load_whole(path);
  PathBudget budget(path, "'lockstep checkpoint convert --key NAME' writes one entry of a file, to be printed alone");
  const auto tensors = matching(tensors_of(value, budget), arguments.tensor_glob);
  if (tensors.empty() && !arguments.tensor_glob.empty())
    throw UsageError(fmt::format("{}: no tensor matches '{}'; lockstep checkpoint show {} lists all tensors", path,
                                 arguments.tensor_glob, path));
  if (arguments.json) {
    print_show_json(path, value, tensors);
  } else {
    const auto style = output_style();
    const auto table = tensors.empty() ? "" : table_of(path, tensors, style);  // may throw, before anything is printed
    if (chooses) std::cout << "The newest checkpoint: " << printable(path) << "\n\n";
    if (arguments.tensor_glob.empty()) std::cout << tree_of(value, style.columns) << "\n";
    if (!table.empty()) std::cout << table << "\n";
    std::cout << totals_line(tensors) << std::flush;
  }
  return 0;
}

}  // namespace lockstep::checkpoint
