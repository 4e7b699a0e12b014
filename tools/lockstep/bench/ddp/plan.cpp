#include "bench/ddp/plan.h"

#include <nlohmann/json.hpp>

namespace lockstep::bench {

using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpPlan, models, backend, python, python_store, ranks, rounds, check, bind,
                                   is_crowded, page, results)

std::string to_text(const DdpPlan& plan) {
  return json(plan).dump();
}

DdpPlan ddp_plan_from(const std::string& text) {
  return json::parse(text).get<DdpPlan>();
}

std::vector<std::string> model_names() {
  return {"small", "cnn", "mlp"};
}

}  // namespace lockstep::bench
