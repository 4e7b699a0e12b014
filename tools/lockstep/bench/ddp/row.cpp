#include "bench/ddp/row.h"

#include <nlohmann/json.hpp>

#include "bench/or_null.h"

namespace lockstep::bench {
namespace {

using json = nlohmann::ordered_json;

void add_times(json& object, const std::string& side, const std::optional<StepTimes>& times) {
  object[side + "_ms"] = times ? json(times->median_ms) : json();
  object[side + "_p10_ms"] = times ? json(times->p10_ms) : json();
  object[side + "_p90_ms"] = times ? json(times->p90_ms) : json();
}

}  // namespace

std::optional<double> DdpRow::ratio_to_python() const {
  if (!python) return std::nullopt;
  return python->median_ms / ddp.median_ms;
}

DdpRow make_ddp_row(const DdpPlan& plan, const DdpSetting& setting, const DdpSamples& samples) {
  DdpRow row;
  row.model = samples.model;
  row.ranks = plan.ranks;
  row.setting = setting;
  row.local = step_times(samples.local_us);
  row.ddp = step_times(samples.ddp_us);
  row.alone = step_times(samples.alone_us);
  if (!samples.python_us.empty()) row.python = step_times(samples.python_us);
  row.rounds = samples.ddp_us.size();
  row.steps = samples.steps;
  if (plan.check) row.wrong = samples.wrong;
  return row;
}

std::string to_json_line(const DdpRow& row) {
  json object{{"op", "ddp"},     {"model", row.model},   {"ranks", row.ranks}, {"backend", row.setting.backend},
              {"batch", kBatch}, {"rounds", row.rounds}, {"steps", row.steps}, {"mkldnn", row.setting.has_mkldnn}};
  add_times(object, "local", row.local);
  add_times(object, "ddp", row.ddp);
  add_times(object, "alone", row.alone);
  add_times(object, "python", row.python);
  object["exposed_ms"] = row.exposed_ms();
  object["exposed_fraction"] = row.exposed_fraction();
  object["ratio_to_local"] = row.ratio_to_local();
  object["ratio_to_python"] = or_null(row.ratio_to_python());
  object["efficiency"] = row.efficiency();
  object["wrong"] = or_null(row.wrong);
  return object.dump();
}

}  // namespace lockstep::bench
