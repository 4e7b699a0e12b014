#include "bench/ddp/messages.h"

#include <nlohmann/json.hpp>

namespace lockstep::bench {

using nlohmann::json;

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpSetting, backend, libtorch, has_mkldnn)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpProgress, model)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DdpSamples, model, steps, wrong, local_us, ddp_us, alone_us, python_us)

std::string to_line(const DdpMessage& message) {
  const auto content = std::visit([](const auto& kind) { return json(kind); }, message);
  return json{{"kind", message.index()}, {"content", content}}.dump();
}

DdpMessage ddp_message_from(const std::string& line) {
  const json object = json::parse(line);
  const json& content = object.at("content");
  switch (object.at("kind").get<size_t>()) {
    case 0:
      return content.get<DdpSetting>();
    case 1:
      return content.get<DdpProgress>();
    default:
      return content.get<DdpSamples>();
  }
}

}  // namespace lockstep::bench
