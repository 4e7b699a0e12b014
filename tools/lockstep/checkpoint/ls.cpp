#include <algorithm>
#include <ctime>
#include <iostream>

#include <c10/core/DeviceType.h>
#include <fmt/format.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "checkpoint/entries.h"
#include "checkpoint/listing.h"
#include "checkpoint/operations.h"
#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

struct Listed {
  CheckpointFile file;
  Value metrics{};
  Value world_size{};
  std::string failure{};  // why the file could not be read
};

Listed read_entries(const CheckpointFile& file) {
  Listed listed{.file = file};
  try {
    const auto value = load_checkpoint(file.path, {.map_location = c10::kMeta});
    if (const auto* metrics = find_entry(value, "metrics")) listed.metrics = *metrics;
    if (const auto* size = find_entry(value, "world_size")) listed.world_size = *size;
  } catch (const Error& error) {
    listed.failure = error.what();
  }
  return listed;
}

std::string time_text(std::time_t time, const char* format, tm* (*convert)(const time_t*, tm*)) {
  tm parts{};
  char text[64];
  if (!convert(&time, &parts) || std::strftime(text, sizeof text, format, &parts) == 0) return "";
  return text;
}

/// "loss 0.25, accuracy 0.9".
std::string metrics_text(const Value& metrics) {
  if (metrics.is_none()) return "-";
  if (!metrics.is(Value::Kind::kDict)) return metrics.to_string(60);
  std::string text;
  for (const auto& [name, value] : metrics.items()) {
    const auto written = value.is(Value::Kind::kFloat) ? fmt::format("{:.4g}", value.as_double()) : value.to_string(30);
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", key_text(name), written);
  }
  return text.empty() ? "-" : text;
}

/// The name of an earlier file that is a hard link to the same file, as best.pt may be; empty if there is none.
std::string same_file_as(const Listed& listed, const std::vector<Listed>& all) {
  for (const auto& other : all) {
    if (&other == &listed) break;
    if (!listed.file.is_link() && other.file.is_same_file(listed.file)) return other.file.name;
  }
  return "";
}

std::string name_text(const CheckpointFile& file, const std::string& same_file) {
  if (file.is_link()) return file.name + " -> " + file.link_target;
  return same_file.empty() ? file.name : file.name + " = " + same_file;
}

void print_table(const std::vector<Listed>& all) {
  const bool has_shards = std::any_of(all.begin(), all.end(), [](const auto& one) { return !one.file.shards.empty(); });
  std::vector<Table::Column> columns{{"NAME", false, true}, {"UNIT"}, {"NUMBER", true}, {"SIZE", true}, {"SAVED"}};
  if (has_shards) columns.push_back({"SHARDS", true});
  columns.insert(columns.end(), {{"WORLD", true}, {"METRICS", false, true}});
  Table table(std::move(columns));
  uint64_t bytes = 0;
  for (const auto& listed : all) {
    const auto& [file, metrics, world_size, failure] = listed;
    const auto same_file = same_file_as(listed, all);
    if (!file.is_link() && same_file.empty()) bytes += file.bytes_with_shards();
    std::vector<std::string> cells{name_text(file, same_file), file.numbered ? file.numbered->unit : "-",
                                   file.numbered ? std::to_string(file.numbered->number) : "-",
                                   human_bytes(file.bytes_with_shards()),
                                   time_text(file.modified, "%Y-%m-%d %H:%M", ::localtime_r)};
    if (has_shards) cells.push_back(file.shards.empty() ? "-" : std::to_string(file.shards.size()));
    cells.push_back(world_size.is_none() ? "-" : world_size.to_string(20));
    cells.push_back(failure.empty() ? metrics_text(metrics) : "cannot be read");
    table.add(std::move(cells));
  }
  std::cout << table.text(output_style())
            << fmt::format("\n{}, {}\n", counted(all.size(), "checkpoint"), human_bytes(bytes)) << std::flush;
}

void print_object(const Listed& listed) {
  const auto& file = listed.file;
  nlohmann::ordered_json object{{"file", file.path}, {"link", nullptr}, {"unit", nullptr}, {"number", nullptr}};
  if (file.is_link()) object["link"] = file.link_target;
  if (file.numbered) {
    object["unit"] = file.numbered->unit;
    object["number"] = file.numbered->number;
  }
  object["bytes"] = file.bytes_with_shards();
  object["shards"] = file.shards.size();
  object["saved"] = time_text(file.modified, "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r);
  object["world_size"] = to_json(listed.world_size);
  object["metrics"] = to_json(listed.metrics);
  object["failure"] = nullptr;
  if (!listed.failure.empty()) object["failure"] = listed.failure;
  print_json(object);
}

}  // namespace

int run_ls(const Arguments& arguments) {
  std::vector<Listed> all;
  bool all_read = true;
  for (const auto& file : find_files(arguments.paths)) {
    all.push_back(read_entries(file));
    if (arguments.json) print_object(all.back());
    all_read = all_read && all.back().failure.empty();
  }
  if (!arguments.json && !all.empty()) print_table(all);
  if (!arguments.json && all.empty()) std::cout << "no checkpoint files (.pt, .pth, .safetensors)\n";
  for (const auto& listed : all)
    if (!listed.failure.empty()) std::cerr << "lockstep checkpoint ls: " + printable(listed.failure) + "\n";
  return all_read ? 0 : 1;
}

}  // namespace lockstep::checkpoint
