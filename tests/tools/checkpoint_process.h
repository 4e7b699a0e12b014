#pragma once

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/checkpoint_file.h>

#include "checkpoint/operations.h"
#include "support/rank_process.h"
#include "support/temporary_folder.h"

/// `lockstep checkpoint` as a process, in a folder with checkpoint files.
namespace lockstep {

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class CheckpointCommand : public testing::Test {
 protected:
  struct Ran {
    int code = -1;
    std::string output, errors;
    int64_t peak_kib = 0;  // the most memory that run() took, without quotes in the arguments
  };

  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  bool exists(const std::string& name) const { return std::filesystem::exists(folder_.path() / name); }
  std::string save(const std::string& name, const Value& value) const { return save_checkpoint(path(name), value); }

  /// Runs a line of the shell in the folder. `checkpoint` in it is `lockstep checkpoint`.
  Ran shell(const std::string& line) const {
    const auto script = "cd '" + folder_.path().string() +
                        "'; checkpoint() { " LOCKSTEP_TOOL " checkpoint \"$@\"; }; ( " + line + " ) >.stdout 2>.stderr";
    return finish({"/bin/sh", "-c", script});
  }

  /// Runs `lockstep checkpoint`. Calls the helper program's function in a forked process, which saves starting LibTorch
  /// (a second of CPU time). Arguments with quotes go through the shell and the programs.
  Ran run(const std::string& arguments) const {
    if (arguments.find('\'') != std::string::npos) return shell("checkpoint " + arguments);
    contained_programs()["checkpoint"] = run_in_folder;
    std::istringstream words(folder_.path().string() + " " + arguments);
    std::vector<std::string> command{"checkpoint"};
    for (std::string word; words >> word;) command.push_back(word);
    return finish(command);
  }

  /// Runs a command with --json that succeeds, and returns its only object.
  nlohmann::json object(const std::string& arguments, int code = 0) const {
    const auto ran = run(arguments + " --json");
    EXPECT_EQ(ran.code, code) << arguments << "\n" << ran.output << ran.errors;
    return nlohmann::json::parse(ran.output, nullptr, false);
  }

  /// Expects exit code `code` and one line on stderr that has this part.
  void expect_failure(const std::string& arguments, int code, const std::string& part) const {
    const auto ran = run(arguments);
    EXPECT_EQ(ran.code, code) << arguments << "\n" << ran.output << ran.errors;
    EXPECT_THAT(ran.errors, testing::HasSubstr(part)) << arguments;
    EXPECT_EQ(std::count(ran.errors.begin(), ran.errors.end(), '\n'), 1) << ran.errors;
  }

  /// Flips a bit of the tensor's data in the file.
  void damage(const std::string& name, const at::Tensor& tensor) const {
    auto bytes = read_text(path(name));
    const std::string data(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
    const auto at = bytes.find(data);
    ASSERT_NE(at, std::string::npos);
    bytes[at + data.size() / 2] ^= 1;
    std::ofstream(path(name), std::ios::binary) << bytes;
  }

  /// Saves a main file with two shards that it lists.
  void save_sharded(const std::string& stem, Value main, const Value& first, const Value& second) const {
    auto shards = Value::list();
    for (const bool is_first : {true, false}) {
      const auto name = stem + ".shard-" + (is_first ? "0" : "1") + "-of-2-1a2b3c4d.pt";
      const auto digest = save(name, is_first ? first : second);
      shards.elements().push_back(Value::dict({{"file", name}, {"sha256", digest}}));
    }
    main.set("lockstep", "0.1.0");
    main.set("shards", shards);
    save(stem + ".pt", main);
  }

  /// The same with shards that cannot be merged.
  void save_sharded(const std::string& stem) const {
    save_sharded(stem, Value::dict(), Value::dict({{"part", at::ones({10})}}), Value::dict({{"part", at::zeros({9})}}));
  }

  TemporaryFolder folder_;

 private:
  /// Carries out a command in a folder.
  static int run_in_folder(const std::vector<std::string>& words) {
    std::filesystem::current_path(words[0]);
    if (!std::freopen(".stdout", "w", stdout) || !std::freopen(".stderr", "w", stderr)) return 127;
    std::vector<const char*> pointers{"lockstep-checkpoint"};
    for (size_t i = 1; i < words.size(); ++i) pointers.push_back(words[i].c_str());
    ::malloc_trim(0);
    if (!(std::ofstream("/proc/self/clear_refs") << "5" << std::flush)) return 127;  // begins a new VmHWM
    const int code = checkpoint::run_checkpoint_program(static_cast<int>(pointers.size()), pointers.data());
    std::ofstream(".peak") << std::ifstream("/proc/self/status").rdbuf();
    return code;
  }

  Ran finish(const std::vector<std::string>& command) const {
    RankProcess process(command, {{"NO_COLOR", ""}, {"TZ", "UTC"}});
    Ran ran;
    ran.code = process.wait(std::chrono::seconds(120));
    ran.output = read_text(path(".stdout"));
    ran.errors = read_text(path(".stderr"));
    const auto status = read_text(path(".peak"));
    if (const auto at = status.find("VmHWM:"); at != std::string::npos)
      ran.peak_kib = std::stoll(status.substr(at + 6));
    return ran;
  }
};

}  // namespace lockstep
