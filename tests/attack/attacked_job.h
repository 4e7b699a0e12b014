#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "attack/control.h"
#include "launch/launcher_process.h"
#include "support/eventually.h"
#include "support/other_user.h"
#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {

/// A generator whose seed is LOCKSTEP_TEST_SEED, or random. Prints the seed, with which a failure can be repeated.
inline std::mt19937 attack_random() {
  const char* given = std::getenv("LOCKSTEP_TEST_SEED");
  const auto seed = given ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device()();
  std::cout << "seed " << seed << ": repeat with LOCKSTEP_TEST_SEED=" << seed << std::endl;
  return std::mt19937(seed);
}

/// The names in a folder that begin so.
inline std::set<std::string> names_in(const std::filesystem::path& folder, const std::string& beginning = "") {
  std::set<std::string> names;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator(folder, gone))
    if (entry.path().filename().string().starts_with(beginning)) names.insert(entry.path().string());
  return names;
}

/// Ranks of attacked_rank that train until the test stops them, and everything that they leave behind.
class AttackedJob {
 public:
  enum class Start { kByLauncher, kDirectly };
  struct Options {
    int ranks = 3;
    std::string backend = "shm";
    Start start = Start::kByLauncher;
    std::vector<std::string> around_launcher{};  // a command that executes its arguments
    std::vector<std::string> around_rank{};      // the same, for each rank that the launcher starts
    std::map<std::string, std::string> variables{};
  };

  explicit AttackedJob(Options options) : options_(std::move(options)) {
    make_control();
    auto variables = clean_environment(options_.variables);
    variables["LOCKSTEP_TEST_ATTACK"] = mark_;
    variables[kControlVariable] = control_file();
    variables["TEST_BACKEND"] = options_.backend;
    variables["TMPDIR"] = shared_.string();
    variables["XDG_STATE_HOME"] = folder_.path() / "state";
    variables["LOCKSTEP_FLIGHT_DIR"] = folder_.path().string();
    variables["OMP_NUM_THREADS"] = "1";
    if (options_.start == Start::kByLauncher)
      start_launcher(variables);
    else
      start_ranks(variables);
  }
  ~AttackedJob() {
    processes_.clear();
    for (int pid : living()) ::kill(pid, SIGKILL);  // after a failure: processes that have the mark of this job
    ::munmap(control_, sizeof(Control));
  }
  AttackedJob(const AttackedJob&) = delete;
  AttackedJob& operator=(const AttackedJob&) = delete;

  int size() const { return options_.ranks; }
  Control& control() { return *control_; }
  RankProgress& rank(int rank) { return control_->ranks[rank]; }
  int pid(int rank) { return static_cast<int>(control_->ranks[rank].pid); }
  /// The launcher; or the process of a rank that was started directly.
  RankProcess& process(int rank = 0) { return *processes_.at(static_cast<size_t>(rank)); }
  /// The folder for temporary files of the job, in which every user may create files.
  const std::filesystem::path& temporary_files() const { return shared_; }

  /// Whether every rank completes so many more steps in time. Returns false at once when a rank has ended.
  bool advances(int64_t steps = 5, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    std::vector<int64_t> goals;
    for (int r = 0; r < size(); ++r) goals.push_back(rank(r).steps + steps);
    bool advanced = false;
    eventually(
        [&] {
          advanced = true;
          for (int r = 0; r < size(); ++r) advanced = advanced && rank(r).steps >= goals[static_cast<size_t>(r)];
          return advanced || any_rank_ended();
        },
        limit);
    return advanced;
  }

  /// Stops the training and expects that every rank had the right results up to the end.
  void expect_right_results() {
    control_->should_stop = true;
    for (auto& process : processes_) EXPECT_EQ(process->wait(std::chrono::seconds(60)), 0) << process->output();
    for (int r = 0; r < size(); ++r) EXPECT_EQ(rank(r).outcome, RankOutcome::kDone) << "rank " << r;
    expect_nothing_left();
  }

  /// Expects that all processes end within a second, and that no file is left.
  void expect_nothing_left() {
    EXPECT_TRUE(eventually([&] { return living().empty(); }, std::chrono::seconds(1)))
        << "processes of the job are left: " << testing::PrintToString(living());
    EXPECT_EQ(names_in(shared_), std::set<std::string>{});
    EXPECT_TRUE(eventually([&] { return new_shared_memory().empty(); }, std::chrono::seconds(1)))
        << testing::PrintToString(new_shared_memory());
  }

  /// Variables of a rank's process, such as MASTER_PORT.
  std::string variable(int rank, const std::string& name) {
    std::ifstream file("/proc/" + std::to_string(pid(rank)) + "/environ");
    for (std::string entry; std::getline(file, entry, '\0');)
      if (entry.starts_with(name + "=")) return entry.substr(name.size() + 1);
    throw std::runtime_error("rank " + std::to_string(rank) + " has no " + name);
  }

  std::vector<int> living() const { return processes_with("LOCKSTEP_TEST_ATTACK=" + mark_); }

 private:
  static inline const std::vector<std::string> kRankCommand{TEST_RANKS, "attacked_rank"};

  bool any_rank_ended() {
    for (int r = 0; r < size(); ++r)
      if (rank(r).outcome != RankOutcome::kNone || (pid(r) > 0 && ::kill(pid(r), 0) != 0)) return true;
    return false;
  }

  std::string control_file() const { return folder_.path() / "control"; }

  void make_control() {
    std::ofstream(control_file()) << std::string(sizeof(Control), '\0');
    ::chmod(control_file().c_str(), 0600);
    control_ = map_control(control_file().c_str());
    if (!control_) throw std::runtime_error("cannot map " + control_file());
  }

  void start_launcher(const std::map<std::string, std::string>& variables) {
    auto command = options_.around_launcher;
    for (const auto& word : run_command({"-n", std::to_string(size()), "--json"})) command.push_back(word);
    command.insert(command.end(), options_.around_rank.begin(), options_.around_rank.end());
    command.insert(command.end(), kRankCommand.begin(), kRankCommand.end());
    processes_.push_back(std::make_unique<RankProcess>(command, variables));
  }

  void start_ranks(std::map<std::string, std::string> variables) {
    variables["WORLD_SIZE"] = std::to_string(size());
    variables["MASTER_ADDR"] = "127.0.0.1";
    variables["MASTER_PORT"] = std::to_string(free_port());
    for (int r = 0; r < size(); ++r) {
      variables["RANK"] = std::to_string(r);
      processes_.push_back(std::make_unique<RankProcess>(kRankCommand, variables));
    }
  }

  std::set<std::string> new_shared_memory() const {
    std::set<std::string> created;
    for (const auto& name : names_in("/dev/shm", "lockstep-"))
      if (!shared_memory_before_.contains(name)) created.insert(name);
    return created;
  }

  static std::string next_mark() {
    static int count = 0;
    return std::to_string(::getpid()) + "." + std::to_string(++count);
  }

  const Options options_;
  const std::string mark_ = next_mark();
  const std::set<std::string> shared_memory_before_ = names_in("/dev/shm", "lockstep-");
  TemporaryFolder folder_;
  const std::filesystem::path shared_ = make_shared_folder(folder_.path());
  Control* control_ = nullptr;
  std::vector<std::unique_ptr<RankProcess>> processes_;
};

}  // namespace lockstep
