#include "bench/messages.h"

#include <nlohmann/json.hpp>

namespace lockstep::bench {
namespace {

using nlohmann::json;

json to_json(const Progress& message) {
  return {{"kind", "progress"}, {"bytes", message.bytes}};
}

json to_json(const RoundTrip& message) {
  return {{"kind", "round_trip"}, {"times_us", message.times_us}};
}

json to_json(const Stream& message) {
  return {{"kind", "stream"}, {"bytes", message.bytes}, {"times_us", message.times_us}};
}

json to_json(const Samples& message) {
  return {{"kind", "samples"},           {"backend", message.backend},
          {"memory", message.memory},    {"bytes", message.bytes},
          {"calls", message.calls},      {"wrong", message.wrong ? json(*message.wrong) : json()},
          {"times_us", message.times_us}};
}

Samples samples_from(const json& object) {
  Samples samples{object.at("backend"), object.at("memory"), object.at("bytes"),
                  object.at("calls"),   std::nullopt,        object.at("times_us")};
  if (!object.at("wrong").is_null()) samples.wrong = object.at("wrong").get<int64_t>();
  return samples;
}

}  // namespace

std::string to_line(const Message& message) {
  return std::visit([](const auto& kind) { return to_json(kind).dump(); }, message);
}

Message message_from(const std::string& line) {
  const json object = json::parse(line);
  const std::string kind = object.at("kind");
  if (kind == "progress") return Progress{object.at("bytes")};
  if (kind == "round_trip") return RoundTrip{object.at("times_us")};
  if (kind == "stream") return Stream{object.at("bytes"), object.at("times_us")};
  return samples_from(object);
}

}  // namespace lockstep::bench
