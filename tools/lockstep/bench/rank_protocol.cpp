#include "bench/rank_protocol.h"

#include <nlohmann/json.hpp>

namespace lockstep::bench {
namespace {

using nlohmann::json;

json to_json(const SizeStarted& message) {
  return {{"kind", "progress"}, {"bytes", message.bytes}};
}

json to_json(const RoundTripTimes& message) {
  return {{"kind", "round_trip"}, {"times_us", message.times_us}};
}

json to_json(const StreamTimes& message) {
  return {{"kind", "stream"}, {"bytes", message.bytes}, {"times_us", message.times_us}};
}

json to_json(const CollectiveSamples& message) {
  return {{"kind", "samples"},           {"backend", message.backend},
          {"memory", message.memory},    {"bytes", message.bytes},
          {"calls", message.calls},      {"wrong", message.wrong ? json(*message.wrong) : json()},
          {"times_us", message.times_us}};
}

CollectiveSamples samples_from(const json& object) {
  CollectiveSamples samples{object.at("backend"), object.at("memory"), object.at("bytes"),
                            object.at("calls"),   std::nullopt,        object.at("times_us")};
  if (!object.at("wrong").is_null()) samples.wrong = object.at("wrong").get<int64_t>();
  return samples;
}

}  // namespace

NLOHMANN_JSON_SERIALIZE_ENUM(Memory, {{Memory::kAllocated, "allocated"},
                                      {Memory::kOrdinary, "ordinary"},
                                      {Memory::kBoth, "both"}})
NLOHMANN_JSON_SERIALIZE_ENUM(Operation, {{Operation::kAllReduce, "all-reduce"},
                                         {Operation::kReduceScatter, "reduce-scatter"},
                                         {Operation::kAllGather, "all-gather"},
                                         {Operation::kBroadcast, "broadcast"},
                                         {Operation::kBarrier, "barrier"}})
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CollectivePlan, operation, backends, ranks, sizes, dtype, redop, memory, rounds,
                                   check, bind, oversubscribed, page, results)

const char* name_of(Memory memory) {
  if (memory == Memory::kBoth) return "both";
  return memory == Memory::kAllocated ? "allocated" : "ordinary";
}

std::string to_text(const CollectivePlan& plan) {
  return json(plan).dump();
}

CollectivePlan collective_plan_from(const std::string& text) {
  return json::parse(text).get<CollectivePlan>();
}

int64_t page_bytes(int ranks) {
  return 128 * (8 + int64_t{ranks});
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpPlan, models, backend, optimizer, python, python_store, ranks, rounds, check,
                                   bind, oversubscribed, page, results)

std::string to_text(const DdpPlan& plan) {
  return json(plan).dump();
}

DdpPlan ddp_plan_from(const std::string& text) {
  return json::parse(text).get<DdpPlan>();
}

std::vector<std::string> model_names() {
  return {"small", "cnn", "mlp"};
}

std::string to_line(const CollectiveMessage& message) {
  return std::visit([](const auto& kind) { return to_json(kind).dump(); }, message);
}

CollectiveMessage collective_message_from(const std::string& line) {
  const json object = json::parse(line);
  const std::string kind = object.at("kind");
  if (kind == "progress") return SizeStarted{object.at("bytes")};
  if (kind == "round_trip") return RoundTripTimes{object.at("times_us")};
  if (kind == "stream") return StreamTimes{object.at("bytes"), object.at("times_us")};
  return samples_from(object);
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpSetup, backend, libtorch, has_mkldnn)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpModelStarted, model)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpSamples, model, steps, wrong, local_us, ddp_us, shared_us, alone_us, python_us)

std::string to_line(const DdpMessage& message) {
  const auto content = std::visit([](const auto& kind) { return json(kind); }, message);
  return json{{"kind", message.index()}, {"content", content}}.dump();
}

DdpMessage ddp_message_from(const std::string& line) {
  const json object = json::parse(line);
  const json& content = object.at("content");
  switch (object.at("kind").get<size_t>()) {
    case 0:
      return content.get<DdpSetup>();
    case 1:
      return content.get<DdpModelStarted>();
    default:
      return content.get<DdpSamples>();
  }
}

}  // namespace lockstep::bench
