// Overview.
//
// metrics.jsonl is written first and is the source of the other files. A record is one line, appended by one write.
// When a run is resumed from a checkpoint, records that were written after that checkpoint describe steps that are
// repeated: they are removed. metrics.csv is a table, so a metric that appears for the first time needs a new column in
// all rows: the file is then written again from metrics.jsonl. TensorBoard drops repeated records itself (see
// tensorboard_writer.cpp).

#include "report/metric_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/private_files.h"
#include "base/text.h"
#include "checkpoint/files.h"

namespace lockstep::detail {
namespace {

using Json = nlohmann::ordered_json;

/// The lines of a file, without a last line that is incomplete. None if there is no file.
std::vector<std::string> complete_lines(const std::string& path) {
  const auto file = open_own_file(path, O_RDONLY);
  std::vector<std::string> lines;
  std::string begun;
  std::array<char, 1 << 16> part;
  while (file.is_open()) {
    const auto got = ::read(file.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_file("read", path);
    if (got == 0) break;
    for (std::string_view rest(part.data(), static_cast<size_t>(got)); !rest.empty();) {
      const auto end = rest.find('\n');
      begun += rest.substr(0, end);
      if (end == std::string_view::npos) break;
      lines.push_back(std::exchange(begun, {}));
      rest.remove_prefix(end + 1);
    }
  }
  return lines;
}

std::vector<MetricRecord> read_records(const std::string& path) {
  std::vector<MetricRecord> records;
  size_t number = 0;
  for (const auto& line : complete_lines(path)) {
    ++number;
    try {
      records.push_back(from_json(line));
    } catch (const UsageError&) {
      log_warning(text(path, ":", number, ": not a record of metrics; the line is removed"));
    }
  }
  return records;
}

std::string csv_cell(const std::string& content) {
  if (content.find_first_of(",\"\r\n") == std::string::npos) return content;
  std::string quoted = "\"";
  for (char letter : content) quoted += letter == '"' ? "\"\"" : std::string(1, letter);
  return quoted + '"';
}

std::string csv_number(double value) {
  return std::isfinite(value) ? Json(value).dump() : "";
}

/// Epochs and seconds, rounded for all files.
double rounded_epoch(const MetricRecord& record) {
  return std::round(record.epoch * 1e6) / 1e6;
}
double rounded_seconds(const MetricRecord& record) {
  return std::round(record.seconds * 1e3) / 1e3;
}

}  // namespace

std::string to_json(const MetricRecord& record) {
  Json line{{"type", record.is_epoch ? "epoch" : "step"}, {"step", record.step}};
  if (record.is_epoch)
    line["epoch"] = static_cast<int64_t>(record.epoch);
  else
    line["epoch"] = rounded_epoch(record);
  line["seconds"] = rounded_seconds(record);
  for (const auto& [name, value] : record.values) line[name] = std::isfinite(value) ? Json(value) : Json();
  return line.dump(-1, ' ', false, Json::error_handler_t::replace);
}

MetricRecord from_json(const std::string& line) {
  const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  try {
    MetricRecord record{.is_epoch = json.at("type") == "epoch",
                        .step = json.at("step"),
                        .epoch = json.at("epoch"),
                        .seconds = json.at("seconds"),
                        .values = {}};
    for (const auto& [name, value] : json.items())
      if (name != "type" && name != "step" && name != "epoch" && name != "seconds")
        record.values[name] = value.is_null() ? std::nan("") : value.get<double>();
    return record;
  } catch (const Json::exception& error) {
    throw UsageError(text("not a record of metrics: ", line));
  }
}

LineFile::LineFile(std::string path, const std::string& content) : path_(std::move(path)) {
  replace_file(path_, content);
  file_ = open_own_file(path_, O_WRONLY | O_APPEND);
  if (!file_.is_open()) throw SystemError(text("open ", path_, ": it was removed"));
  length_ = static_cast<int64_t>(content.size());
}

void LineFile::append(const std::string& line) {
  const auto bytes = line + '\n';
  ssize_t written = 0;
  do written = ::write(file_.get(), bytes.data(), bytes.size());
  while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(bytes.size())) {
    length_ += written;
    return;
  }
  const int reason = written < 0 ? errno : ENOSPC;
  if (::ftruncate(file_.get(), length_) != 0) log_debug(text("ftruncate ", path_, ": ", std::strerror(errno)));
  if (!std::exchange(has_warned_, true))
    log_warning(text("write ", path_, ": ", std::strerror(reason), "; metrics are lost until it can be written again"));
}

void check_own_files(const std::string& folder) {
  for (const char* name : {"/metrics.jsonl", "/metrics.csv"}) open_own_file(folder + name, O_RDONLY);
}

MetricFiles::MetricFiles(std::string folder, const MetricLogOptions& options, int64_t steps, int64_t epochs)
    : folder_(std::move(folder)), options_(options) {
  const auto path = folder_ + "/metrics.jsonl";
  std::string kept;
  for (const auto& record : read_records(path)) {
    if (record.is_epoch ? record.epoch > static_cast<double>(epochs) : record.step > steps) continue;
    kept += to_json(record) + '\n';
    add_columns(record);
  }
  jsonl_ = std::make_unique<LineFile>(path, kept);
  if (options_.csv) write_table();
  if (!options_.tensorboard) return;
  try {
    tensorboard_ =
        std::make_unique<TensorBoardWriter>(folder_, TensorBoardWriterOptions{.first_step = steps > 0 ? steps + 1 : 0});
  } catch (const SystemError& error) {
    log_warning(text(error.what(), "; there is no file for TensorBoard, metrics.jsonl has all records"));
  }
}

void MetricFiles::write_table() {
  try {
    csv_ = std::make_unique<LineFile>(folder_ + "/metrics.csv", csv_table());
  } catch (const Error& error) {
    log_warning(text(error.what(), "; metrics.csv is not written any more, metrics.jsonl has all records"));
    csv_.reset();
  }
}

void MetricFiles::write(const MetricRecord& record) {
  jsonl_->append(to_json(record));
  if (csv_ && add_columns(record))
    write_table();
  else if (csv_)
    csv_->append(csv_row(record));
  if (!tensorboard_) return;
  for (const auto& [name, value] : record.values)
    tensorboard_->scalar(record.is_epoch ? "epoch/" + name : name, value, record.step);
}

/// Returns whether the record has a metric without a column.
bool MetricFiles::add_columns(const MetricRecord& record) {
  const size_t before = columns_.size();
  for (const auto& [name, value] : record.values)
    if (std::find(columns_.begin(), columns_.end(), name) == columns_.end()) columns_.push_back(name);
  return columns_.size() > before;
}

std::string MetricFiles::csv_row(const MetricRecord& record) const {
  auto row = text(record.is_epoch ? "epoch" : "step", ",", record.step, ",", csv_number(rounded_epoch(record)), ",",
                  csv_number(rounded_seconds(record)));
  for (const auto& name : columns_) {
    const auto found = record.values.find(name);
    row += "," + (found == record.values.end() ? "" : csv_number(found->second));
  }
  return row;
}

std::string MetricFiles::csv_table() const {
  std::string table = "type,step,epoch,seconds";
  for (const auto& name : columns_) table += "," + csv_cell(name);
  table += '\n';
  for (const auto& record : read_records(folder_ + "/metrics.jsonl")) table += csv_row(record) + '\n';
  return table;
}

void write_summary(const std::string& path, const RunSummary& summary) {
  Json json{{"status", summary.is_complete ? "complete" : "stopped early"},
            {"epochs", summary.epochs},
            {"steps", summary.steps},
            {"world_size", summary.world_size},
            {"samples", summary.samples},
            {"samples_per_second", std::round(static_cast<double>(summary.samples) / summary.seconds)},
            {"metrics", Json::object()}};
  for (const auto& [name, value] : summary.metrics) json["metrics"][name] = std::isfinite(value) ? Json(value) : Json();
  try {
    replace_file(path, json.dump(2, ' ', false, Json::error_handler_t::replace) + '\n');
  } catch (const SystemError& error) {
    log_warning(error.what());
  }
}

void write_settings(const std::string& path, const std::map<std::string, RunSetting>& settings) {
  if (settings.empty()) {
    ::unlink(path.c_str());  // of an earlier start
    return;
  }
  Json json = Json::object();
  for (const auto& [name, setting] : settings)
    std::visit([&json = json[name]](const auto& value) { json = value; }, setting.value());  // null for NaN, infinity
  try {
    replace_file(path, json.dump(2, ' ', false, Json::error_handler_t::replace) + '\n');
  } catch (const SystemError& error) {
    log_warning(error.what());
  }
}

}  // namespace lockstep::detail
