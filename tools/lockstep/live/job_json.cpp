#include <nlohmann/json.hpp>

#include "live/job_view.h"

namespace lockstep::live {
namespace {

using Json = nlohmann::json;

template <class Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

Json json_of(const TimeShares& time) {
  return {{"forward", or_null(time.forward)},
          {"backward", or_null(time.backward)},
          {"communication", or_null(time.communication)},
          {"data", or_null(time.data)},
          {"other", or_null(time.other)}};
}

Json json_of(const BlockedCall& call) {
  return {{"operation", call.operation},
          {"group", call.group},
          {"number", call.number},
          {"seconds", call.seconds},
          {"where", call.where}};
}

Json json_of(const GpuFigures& gpu) {
  return {{"name", gpu.name},
          {"utilization", or_null(gpu.utilization)},
          {"memory_used_bytes", gpu.memory_used_bytes},
          {"memory_total_bytes", gpu.memory_total_bytes}};
}

Json json_of(const RankFailure& failure) {
  Json calls = Json::array();
  for (const auto& call : failure.calls)
    calls.push_back({{"what", call.what},
                     {"state", call.state},
                     {"group", call.group},
                     {"site", call.site},
                     {"started_seconds_ago", or_null(call.started_seconds_ago)},
                     {"took_seconds", or_null(call.took_seconds)}});
  return {{"kind", failure.kind},
          {"message", failure.message},
          {"flight_recorder", failure.flight_recorder},
          {"calls", std::move(calls)}};
}

Json json_of(const RankView& rank) {
  return {{"rank", rank.rank},
          {"state", name_of(rank.state)},
          {"note", rank.note},
          {"is_straggler", rank.is_straggler},
          {"has_file", rank.has_file},
          {"age", rank.age},
          {"host", rank.host},
          {"pid", rank.pid},
          {"local_rank", rank.local_rank},
          {"device", rank.device},
          {"step", rank.step},
          {"epoch", rank.epoch},
          {"epochs", rank.epochs},
          {"batch", rank.batch},
          {"batches", rank.batches},
          {"steps_per_second", or_null(rank.steps_per_second)},
          {"samples_per_second", or_null(rank.samples_per_second)},
          {"resident_bytes", or_null(rank.resident_bytes)},
          {"time", json_of(rank.time)},
          {"call", rank.call ? json_of(*rank.call) : Json()},
          {"gpu", rank.gpu ? json_of(*rank.gpu) : Json()},
          {"failure", rank.failure ? json_of(*rank.failure) : Json()}};
}

Json json_of(const NodeView& node) {
  return {{"node", node.node},
          {"host", node.host},
          {"pid", node.pid},
          {"command", node.command},
          {"state", name_of(node.state)},
          {"age", node.age},
          {"workers", node.workers}};
}

template <class Parts>
Json list_of(const Parts& parts) {
  Json list = Json::array();
  for (const auto& part : parts) list.push_back(json_of(part));
  return list;
}

}  // namespace

nlohmann::json to_json(const JobView& view) {
  return {{"job", view.job},
          {"attempt", view.attempt},
          {"started", view.started},
          {"updated", view.updated},
          {"elapsed", view.elapsed},
          {"is_live", view.is_live},
          {"state", name_of(view.state)},
          {"world_size", view.world_size},
          {"step", view.step},
          {"epoch", view.epoch},
          {"epochs", view.epochs},
          {"batch", view.batch},
          {"batches", view.batches},
          {"samples_per_second", or_null(view.samples_per_second)},
          {"report", view.report},
          {"problems", view.problems},
          {"nodes", list_of(view.nodes)},
          {"ranks", list_of(view.ranks)}};
}

}  // namespace lockstep::live
