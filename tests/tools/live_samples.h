#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "live/job_view.h"
#include "support/temporary_folder.h"

/// Live files as ranks and launchers write them.
namespace lockstep::live {

using Json = nlohmann::json;

constexpr double kNow = 1794935648.5;

/// The file of a rank that runs.
inline Json rank_json(int64_t rank, const Json& changes = Json::object()) {
  Json file{{"format", 1},
            {"job", "job-1"},
            {"attempt", 0},
            {"rank", rank},
            {"world_size", 4},
            {"local_rank", rank},
            {"host", "node0"},
            {"pid", 1000 + rank},
            {"device", "cpu"},
            {"started", kNow - 60},
            {"updated", kNow - 0.5},
            {"state", "running"},
            {"step", 100},
            {"epoch", 1.5},
            {"epochs", 20},
            {"batch", 50},
            {"batches", 100},
            {"steps_per_second", 10.0},
            {"samples_per_second", 320.0},
            {"time", {{"forward", 0.3}, {"backward", 0.4}, {"communication", 0.2}, {"data", 0.05}, {"other", 0.05}}},
            {"call", nullptr},
            {"memory", {{"resident_bytes", 512 << 20}}},
            {"gpu", nullptr},
            {"failure", nullptr}};
  file.merge_patch(changes);
  return file;
}

inline Json worker_json(int64_t rank, const Json& changes = Json::object()) {
  Json worker{{"rank", rank},    {"local_rank", rank}, {"pid", 1000 + rank}, {"state", "running"},
              {"failed", false}, {"how", ""},          {"seconds", 60.0},    {"uncaught", ""}};
  worker.merge_patch(changes);
  return worker;
}

inline Json node_json(const std::vector<Json>& workers, const Json& changes = Json::object()) {
  Json file{{"format", 1},          {"job", "job-1"},        {"attempt", 0},       {"node", 0},
            {"nodes", 1},           {"host", "node0"},       {"pid", 999},         {"command", {"./train"}},
            {"started", kNow - 61}, {"updated", kNow - 0.5}, {"state", "running"}, {"workers", workers},
            {"report", nullptr}};
  file.merge_patch(changes);
  return file;
}

inline Json call_json(double seconds) {
  return {{"operation", "all_reduce"},
          {"group", "world"},
          {"number", 812},
          {"seconds", seconds},
          {"where", "train.cpp:88"}};
}

inline Json communication(double share) {
  return {{"time", {{"communication", share}}}};
}

/// What a rank file becomes after parsing.
inline RankFile rank_file(int64_t rank, const Json& changes = Json::object()) {
  return parse_rank_file(rank_json(rank, changes).dump());
}

/// The parsed files of a job.
inline LiveFiles files_of(const std::vector<Json>& ranks, const std::vector<Json>& nodes = {}) {
  LiveFiles files;
  for (const auto& rank : ranks) files.ranks[rank.at("rank")] = parse_rank_file(rank.dump());
  for (const auto& node : nodes) files.nodes[node.at("node")] = parse_node_file(node.dump());
  return files;
}

/// A folder with live files.
class LiveFolder : public testing::Test {
 protected:
  std::filesystem::path run() const { return std::filesystem::canonical(folder_.path()) / "run"; }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((run() / name).parent_path());
    std::ofstream(run() / name, std::ios::binary) << text;
  }

  void write_rank(const Json& file) const {
    const auto number = std::to_string(file.at("rank").get<int64_t>());
    write("live/rank-" + std::string(5 - std::min<size_t>(5, number.size()), '0') + number + ".json", file.dump());
  }

  void write_node(const Json& file) const { write("live/node-000.json", file.dump()); }

  TemporaryFolder folder_;
};

}  // namespace lockstep::live
