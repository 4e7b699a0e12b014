#include "bench/checkpoint_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace lockstep::bench {
namespace {

constexpr int64_t kElementBytes = 4;
constexpr int64_t kMinLayers = 16;
constexpr int64_t kNarrowest = 32;

int64_t layer_elements(int64_t width) {
  return 12 * width * width + 13 * width;
}

/// The largest power of two with which the layers fit.
int64_t choose_width(int64_t elements) {
  int64_t width = kNarrowest;
  while (kMinLayers * layer_elements(2 * width) <= elements) width *= 2;
  return width;
}

void add_layer(std::vector<SavedParameter>& parameters, int64_t layer, int64_t width) {
  const auto add = [&](const char* name, std::vector<int64_t> sizes) {
    parameters.push_back({fmt::format("layer{}_{}", layer, name), std::move(sizes)});
  };
  add("norm1_weight", {width});
  add("norm1_bias", {width});
  add("qkv_weight", {3 * width, width});
  add("qkv_bias", {3 * width});
  add("projection_weight", {width, width});
  add("projection_bias", {width});
  add("norm2_weight", {width});
  add("norm2_bias", {width});
  add("widen_weight", {4 * width, width});
  add("widen_bias", {4 * width});
  add("narrow_weight", {width, 4 * width});
  add("narrow_bias", {width});
}

}  // namespace

int64_t SavedParameter::bytes() const {
  return std::accumulate(sizes.begin(), sizes.end(), kElementBytes, std::multiplies<>());
}

int64_t CheckpointPlan::parameter_bytes() const {
  int64_t sum = 0;
  for (const auto& parameter : parameters) sum += parameter.bytes();
  return sum;
}

std::vector<SavedParameter> plan_parameters(int64_t bytes) {
  const int64_t elements = bytes / kElementBytes;
  const int64_t width = choose_width(elements);
  const int64_t last_norm = 2 * width;
  int64_t layers = (elements - last_norm) / layer_elements(width);
  if (layers > kMinLayers) --layers;  // leaves room for an embedding of some size
  const int64_t vocabulary = std::max<int64_t>(1, (elements - last_norm - layers * layer_elements(width)) / width);
  std::vector<SavedParameter> parameters{{"embedding_weight", {vocabulary, width}}};
  for (int64_t layer = 0; layer < layers; ++layer) add_layer(parameters, layer, width);
  parameters.push_back({"norm_weight", {width}});
  parameters.push_back({"norm_bias", {width}});
  return parameters;
}

std::string to_text(const CheckpointPlan& plan) {
  auto parameters = nlohmann::json::array();
  for (const auto& parameter : plan.parameters) parameters.push_back({parameter.name, parameter.sizes});
  return nlohmann::json{{"parameters", parameters}, {"threads", plan.threads}, {"check", plan.check}}.dump();
}

CheckpointPlan checkpoint_plan_from(const std::string& text) {
  const auto object = nlohmann::json::parse(text);
  CheckpointPlan plan;
  for (const auto& parameter : object.at("parameters"))
    plan.parameters.push_back({parameter.at(0), parameter.at(1).get<std::vector<int64_t>>()});
  plan.threads = object.at("threads");
  plan.check = object.at("check");
  return plan;
}

}  // namespace lockstep::bench
