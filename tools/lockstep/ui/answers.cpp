#include "ui/answers.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "base/live_folder.h"
#include "base/text.h"
#include "live/job_view.h"
#include "live/open_metrics.h"
#include "plot/curve.h"
#include "ui/curve.h"
#include "ui/find_runs.h"

namespace lockstep::ui {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxPoints = 20000, kMaxLines = 2000, kDefaultLines = 100;

std::string text_of(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Answer refused(int status, const std::string& why) {
  return {.status = status, .body = text_of({{"error", why}})};
}

std::string parameter(const Parameters& parameters, const std::string& name, const std::string& otherwise = "") {
  const auto found = parameters.find(name);
  return found == parameters.end() ? otherwise : found->second;
}

/// A number; NaN if the parameter is absent or not a number.
double number(const Parameters& parameters, const std::string& name) {
  const auto written = parameter(parameters, name);
  double value = 0;
  const auto parsed = std::from_chars(written.data(), written.data() + written.size(), value);
  const bool is_number = parsed.ec == std::errc() && parsed.ptr == written.data() + written.size();
  return is_number ? value : std::numeric_limits<double>::quiet_NaN();
}

size_t count(const Parameters& parameters, const std::string& name, size_t otherwise, size_t most) {
  const auto written = parse_number<size_t>(parameter(parameters, name));
  return std::clamp<size_t>(written.value_or(otherwise), 1, most);
}

std::shared_ptr<const Run> run_of(const RunCatalog& catalog, const Parameters& parameters) {
  const auto id = parse_number<int>(parameter(parameters, "run"));
  return id ? catalog.find(*id) : nullptr;
}

Answer no_such_run() {
  return refused(404, "there is no run with this number: read /api/runs again");
}

/// Writes JSON. Doubles are written by fmt, which is several times as fast as a tree of values.
class NumberWriter {
 public:
  explicit NumberWriter(std::string& out) : out_(out) {}

  void list(const char* key, const std::vector<double>& numbers) {
    fmt::format_to(std::back_inserter(out_), "\"{}\":[", key);
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (i > 0) out_ += ',';
      number(numbers[i]);
    }
    out_ += "],";
  }

  void field(const char* key, double value) {
    fmt::format_to(std::back_inserter(out_), "\"{}\":", key);
    number(value);
    out_ += ',';
  }

 private:
  void number(double value) {
    if (!std::isfinite(value))
      out_ += "null";
    else
      fmt::format_to(std::back_inserter(out_), "{:.9g}", value);
  }

  std::string& out_;
};

void append_curve(std::string& out, const Curve& curve, bool is_smoothed) {
  NumberWriter writer(out);
  out += '{';
  writer.list("x", curve.x);
  writer.list("low", curve.low);
  // NaN is different from itself, but gaps are at the same places.
  const bool is_flat = std::equal(curve.low.begin(), curve.low.end(), curve.high.begin(),
                                  [](double low, double high) { return low == high || std::isnan(low); });
  if (!is_flat) writer.list("high", curve.high);
  if (is_smoothed) writer.list("smooth", curve.smooth);
  writer.field("first_x", curve.first_x);
  writer.field("last_x", curve.last_x);
  writer.field("last", curve.last);
  writer.field("lowest", curve.lowest);
  writer.field("highest", curve.highest);
  fmt::format_to(std::back_inserter(out), "\"points\":{}}}", curve.points);
}

/// Only noisy values are smoothed: an average of other values would hide them.
bool needs_smoothing(const RecordTable& table, int number, const std::string& metric) {
  const bool is_known = number >= 0 && static_cast<size_t>(number) < table.columns.size();
  return is_known && !plot::is_schedule(metric) && plot::is_noisy(table.columns[static_cast<size_t>(number)].values);
}

std::optional<XAxis> axis_called(const std::string& name) {
  if (name == "step") return XAxis::kStep;
  if (name == "epoch") return XAxis::kEpoch;
  if (name == "time") return XAxis::kTime;
  return std::nullopt;
}

std::vector<int> ids_in(std::string_view written) {
  std::vector<int> ids;
  while (!written.empty()) {
    const auto part = written.substr(0, written.find(','));
    written.remove_prefix(std::min(written.size(), part.size() + 1));
    if (const auto id = parse_number<int>(part)) ids.push_back(*id);
  }
  return ids;
}

}  // namespace

std::string tag_of_runs(const RunCatalog& catalog) {
  return fmt::format("runs-{}", catalog.version());
}

Answer answer_runs(const RunCatalog& catalog) {
  Answer answer{.tag = tag_of_runs(catalog)};  // before reading: a later change gets another tag
  answer.body = text_of(catalog.descriptions());
  return answer;
}

Answer answer_curves(const RunCatalog& catalog, const Parameters& parameters) {
  const auto metric = parameter(parameters, "metric");
  const auto x = axis_called(parameter(parameters, "x", "step"));
  if (!x) return refused(400, "x is not valid: it must be step, epoch or time");
  const double smoothing = number(parameters, "smooth");
  const CurveRequest request{.x = *x,
                             .from = number(parameters, "from"),
                             .to = number(parameters, "to"),
                             .buckets = count(parameters, "points", 1000, kMaxPoints),
                             .smoothing = smoothing > 0 && smoothing < 1 ? smoothing : 0,
                             .is_x_logarithmic = parameter(parameters, "logx") == "1"};
  const CurveRequest as_it_is = [&] {
    auto copy = request;
    copy.smoothing = 0;
    return copy;
  }();
  Answer answer;
  answer.body = "{\"metric\":" + text_of(metric) + ",\"curves\":[";
  bool is_first = true;
  for (const int id : ids_in(parameter(parameters, "runs"))) {
    const auto run = catalog.find(id);
    if (!run) continue;
    if (!std::exchange(is_first, false)) answer.body += ',';
    fmt::format_to(std::back_inserter(answer.body), "{{\"run\":{},\"version\":{},", id, run->version());
    run->metrics().with_records([&](const Records& records) {
      const int number = records.find(metric);
      answer.body += "\"steps\":";
      const bool is_smoothed = request.smoothing > 0 && needs_smoothing(records.steps(), number, metric);
      append_curve(answer.body, curve_of(records.steps(), number, is_smoothed ? request : as_it_is), is_smoothed);
      answer.body += ",\"epochs\":";
      append_curve(answer.body, curve_of(records.epochs(), number, as_it_is), false);
    });
    answer.body += '}';
  }
  answer.body += "]}";
  return answer;
}

Answer answer_ranks(const RunCatalog& catalog, const Parameters& parameters) {
  const auto run = run_of(catalog, parameters);
  if (!run) return no_such_run();
  return {.body = run->live()};
}

Answer answer_output(const RunCatalog& catalog, const Parameters& parameters) {
  const auto run = run_of(catalog, parameters);
  if (!run) return no_such_run();
  const auto rank = parse_number<int>(parameter(parameters, "rank"));
  if (!rank || *rank < 0) return refused(400, "rank is not valid: it must be 0 or more");
  Json output{{"rank", *rank}, {"lines", Json::array()}, {"problem", ""}};
  try {
    output["lines"] = live::last_lines(run->folder(), *rank, count(parameters, "lines", kDefaultLines, kMaxLines));
  } catch (const Error& error) {
    output["problem"] = error.what();
  }
  return {.body = text_of(output)};
}

Answer answer_checkpoints(const RunCatalog& catalog, const Parameters& parameters) {
  const auto run = run_of(catalog, parameters);
  if (!run) return no_such_run();
  Json files = Json::array();
  for (const auto& file : list_checkpoints(run->folder()))
    files.push_back({{"name", file.name},
                     {"is_best", file.is_best},
                     {"best_of", file.best_of},
                     {"bytes", file.bytes},
                     {"saved", file.saved}});
  return {.body = text_of({{"folder", (run->folder() / "checkpoints").string()}, {"files", std::move(files)}})};
}

Answer answer_open_metrics(const RunCatalog& catalog) {
  const double now = unix_time();
  std::vector<live::RunView> views;
  for (const auto& run : catalog.runs())
    views.push_back({.name = run->description().value("name", ""),
                     .job = live::read_job(run->folder(), now),
                     .metrics = live::last_metrics(run->folder())});
  return {.content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8",
          .body = live::open_metrics(views, now)};
}

}  // namespace lockstep::ui
