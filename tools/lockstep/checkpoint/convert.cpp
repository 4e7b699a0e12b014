#include <sys/stat.h>

#include <iostream>
#include <map>
#include <set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "checkpoint/element_budget.h"
#include "checkpoint/entries.h"
#include "checkpoint/operations.h"
#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

using Kind = Value::Kind;
using nlohmann::ordered_json;

enum class Format { kTorch, kSafetensors };

Format format_of(const std::string& path) {
  if (path.ends_with(".safetensors")) return Format::kSafetensors;
  if (path.ends_with(".pt") || path.ends_with(".pth")) return Format::kTorch;
  throw UsageError(fmt::format("{}: unknown extension, expected .pt, .pth or .safetensors", path));
}

void check_output(const Arguments& arguments) {
  struct stat in {};
  struct stat out {};
  if (::stat(arguments.second.c_str(), &out) != 0) return;
  if (::stat(arguments.first.c_str(), &in) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
    throw UsageError(fmt::format("{}: is both IN and OUT; choose another name for OUT", arguments.second));
  if (!arguments.force)
    throw UsageError(fmt::format("{}: exists already; choose another name or add --force", arguments.second));
}

/// The entry that --key names, or the whole value.
Value select(const Value& value, const Arguments& arguments) {
  if (arguments.key.empty()) return value;
  if (const auto* found = find_entry(value, arguments.key.c_str())) return *found;
  if (!value.is(Kind::kDict))
    throw UsageError(fmt::format("{}: contains a {}, which has no entry '{}'; remove --key", arguments.first,
                                 name_of(value.kind()), arguments.key));
  std::vector<std::string> keys;
  for (const auto& [key, item] : value.items()) keys.push_back(key_text(key));
  throw UsageError(fmt::format("{}: has no entry '{}'; its entries are {}", arguments.first, arguments.key,
                               shorten(printable(fmt::format("{}", fmt::join(keys, ", "))), 200)));
}

/// The paths of the outermost values without tensors.
class ValuesWithoutTensors {
 public:
  ValuesWithoutTensors(const Value& value, PathBudget& budget) : contents_(value), budget_(budget) { add(value); }
  std::vector<std::string> take() { return std::move(paths_); }

 private:
  void add(const Value& value) {
    if (value.is(Kind::kTensor)) return;
    if (contents_[value].totals.tensors == 0) {
      budget_.spend(path_.text());
      paths_.push_back(path_.text().empty() ? "value" : path_.text());
      return;
    }
    for_each_inside(value, [&](const std::string& key, const Value& inner) { path_.inside(key, [&] { add(inner); }); });
  }

  const ContentsOf contents_;
  Path path_;
  PathBudget& budget_;
  std::vector<std::string> paths_;
};

struct Conversion {
  Totals totals{};
  std::vector<std::string> left_out{};             // values that are not tensors
  std::vector<std::vector<std::string>> shared{};  // tensors that were written more than once
};

/// Writes a storage once for each dtype of its tensors: older versions of PyTorch read a storage as one dtype.
void write_as_torch(const Value& value, const std::vector<NamedTensor>& tensors, const Arguments& arguments) {
  constexpr size_t kMaxDtypes = 4;
  std::map<const void*, std::set<at::ScalarType>> dtypes_of;
  for (const auto& [name, tensor] : tensors) {
    auto& dtypes = dtypes_of[tensor.storage().unsafeGetStorageImpl()];
    dtypes.insert(tensor.scalar_type());
    if (dtypes.size() > kMaxDtypes)
      throw CheckpointError(fmt::format(
          "{}: tensor '{}' has the memory of tensors of {} other dtypes, expected {} dtypes or fewer: a .pt file "
          "would have the memory once for each of them; select an entry with --key",
          arguments.first, shorten(name, 200), dtypes.size() - 1, kMaxDtypes));
  }
  save_checkpoint(arguments.second, value);
}

/// safetensors files cannot hold other values, or tensors that share memory.
void write_as_safetensors(const std::vector<NamedTensor>& all, const Arguments& arguments) {
  std::map<std::string, at::Tensor> tensors;
  ElementBudget budget(arguments.first, all,
                       "convert to .pt, which keeps the repetitions, or select an entry with --key");
  for (const auto& named : all) {
    budget.spend(named, bytes_of(named.tensor));
    const auto name = named.name.empty() ? "value" : named.name;
    if (!tensors.emplace(name, named.tensor).second)
      throw UsageError(
          fmt::format("{}: two tensors would have the name '{}' in a safetensors file; select one entry "
                      "with --key",
                      arguments.first, name));
  }
  if (tensors.empty())
    throw UsageError(fmt::format("{}: contains no tensors to write to a safetensors file", arguments.first));
  save_safetensors(arguments.second, tensors);
}

void print_notes(const Arguments& arguments, const Conversion& conversion) {
  if (!conversion.left_out.empty())
    std::cerr << fmt::format("note: not tensors, so not in {}: {}\n", printable(arguments.second),
                             printable(fmt::format("{}", fmt::join(conversion.left_out, ", "))));
  for (const auto& group : conversion.shared)
    std::cerr << fmt::format("note: written {} times, because safetensors files cannot share memory: {}\n",
                             group.size(), printable(fmt::format("{}", fmt::join(group, ", "))));
}

}  // namespace

int run_convert(const Arguments& arguments) {
  const auto format = format_of(arguments.second);
  check_output(arguments);
  const auto value = select(load_whole(arguments.first), arguments);
  PathBudget budget(arguments.first, "select another entry with --key");
  const auto tensors = tensors_of(value, budget);
  Conversion conversion;
  for (const auto& named : tensors) conversion.totals.add(named.tensor);
  if (format == Format::kSafetensors) {
    conversion.left_out = ValuesWithoutTensors(value, budget).take();
    conversion.shared = overlapping(tensors);
    write_as_safetensors(tensors, arguments);
  } else {
    write_as_torch(value, tensors, arguments);
  }
  print_notes(arguments, conversion);
  if (arguments.json)
    print_json({{"in", arguments.first},
                {"out", arguments.second},
                {"tensors", conversion.totals.tensors},
                {"bytes", conversion.totals.bytes},
                {"left_out", conversion.left_out},
                {"written_more_than_once", conversion.shared}});
  else
    std::cout << fmt::format("wrote {}: {}, {}\n", printable(arguments.second),
                             counted(conversion.totals.tensors, "tensor"), human_bytes(conversion.totals.bytes));
  return 0;
}

}  // namespace lockstep::checkpoint
