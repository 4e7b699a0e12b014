#pragma once

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

/// A python3 that has torch; empty when there is none.
inline std::string python_with_torch() {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON");
  return python ? python : "";
}

/// Runs ddp_oracle.py as `size` processes of Python's torch.distributed, which may share a GPU, and keeps what they
/// ended with. Throws std::runtime_error, with all that they said, when one of them fails.
class PythonOracle {
 public:
  PythonOracle(const std::string& python, int size, const torch::Device& device) : size_(size) {
    const auto script = std::string(LOCKSTEP_TEST_SOURCE_DIR) + "/parallel/ddp_oracle.py";
    const std::vector<std::string> rest{std::to_string(size), folder_.path().string(), device.str()};
    std::vector<std::unique_ptr<RankProcess>> ranks;
    for (int rank = 0; rank < size; ++rank) {
      const auto number = std::to_string(rank);
      std::vector<std::string> command{python, script, number};
      command.insert(command.end(), rest.begin(), rest.end());
      const std::map<std::string, std::string> may_share_a_gpu{{"NCCL_HOSTID", number}, {"NCCL_SOCKET_IFNAME", "lo"}};
      ranks.push_back(std::make_unique<RankProcess>(command, may_share_a_gpu));
    }
    bool has_failed = false;
    std::string said;
    for (auto& rank : ranks) {
      has_failed |= rank->wait(std::chrono::minutes(2)) != 0;
      said += rank->output();
    }
    if (has_failed) throw std::runtime_error(python + " " + script + " failed on " + device.str() + ":\n" + said);
  }

  /// Parameters and buffers at the end of a scenario, one after the other: a row for each rank.
  torch::Tensor values(const std::string& scenario) const {
    std::vector<torch::Tensor> rows;
    for (int rank = 0; rank < size_; ++rank) rows.push_back(read(scenario + "." + std::to_string(rank)));
    return torch::stack(rows);
  }

 private:
  torch::Tensor read(const std::string& name) const {
    std::ifstream file(folder_.path() / name, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    if (bytes.empty()) throw std::runtime_error("ddp_oracle.py wrote no '" + name + "': has it such a scenario?");
    const auto count = static_cast<int64_t>(bytes.size() / sizeof(double));
    return torch::from_blob(bytes.data(), {count}, torch::kDouble).clone();
  }

  const int size_;
  TemporaryFolder folder_;
};
