#pragma once

#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

/// The lines of a text file.
inline std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

/// The records of metrics.jsonl of a folder.
inline std::vector<nlohmann::json> records_of(const std::string& folder) {
  std::vector<nlohmann::json> records;
  for (const auto& line : lines_of(folder + "/metrics.jsonl")) records.push_back(nlohmann::json::parse(line));
  return records;
}

inline std::vector<nlohmann::json> records_of(const std::string& folder, const std::string& type) {
  auto records = records_of(folder);
  std::erase_if(records, [&](const auto& record) { return record.at("type") != type; });
  return records;
}
