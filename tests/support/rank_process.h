#pragma once

#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Main functions of programs that are linked into this process, by path. For such a program RankProcess forks and
/// calls the function instead of exec, which saves loading LibTorch (most of a second of CPU time). Register only while
/// this process has a single thread.
using ProgramFunction = int (*)(const std::vector<std::string>& arguments);
std::map<std::string, ProgramFunction>& contained_programs();

/// A process that a test starts and exchanges lines with. It never outlives the object.
class RankProcess {
 public:
  using Clock = std::chrono::steady_clock;
  /// Only a hang takes so long, also on a machine whose processors are busy elsewhere: loading LibTorch, which usually
  /// takes half a second, has taken half a minute.
  static constexpr std::chrono::milliseconds kPatience = std::chrono::minutes(2);

  /// Starts the program. `variables` are added to this process's environment; an empty value removes a variable.
  RankProcess(const std::vector<std::string>& command, const std::map<std::string, std::string>& variables);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int pid() const { return pid_; }

  /// Returns the next line, after the one that the last call returned, that starts with `beginning`. If it does not
  /// arrive in time, the test fails and an empty string is returned.
  std::string expect_line(const std::string& beginning, std::chrono::milliseconds limit = kPatience);

  void say(const std::string& line);
  void signal(int number);

  /// Returns the exit code, or 128 plus the signal. If the process does not end in time, the test fails and -1 is
  /// returned.
  int wait(std::chrono::milliseconds limit = kPatience);

  /// Everything that the process has printed to stdout and stderr so far.
  const std::string& output() const { return output_; }

 private:
  bool read_more(Clock::time_point deadline);

  int pid_ = -1;
  int in_ = -1;
  int out_ = -1;
  std::string output_;
  size_t looked_at_ = 0;
  std::optional<int> status_;
};

/// The ranks of one job. Each is a process that runs `program scenario arguments...`; they rendezvous on a port that is
/// unique to the job.
class JobProcesses {
 public:
  JobProcesses(std::string program, int world_size, std::vector<std::string> arguments,
               std::map<std::string, std::string> variables = {});

  /// Starts a rank. Starting a rank twice creates a duplicate.
  RankProcess& start(int rank);
  void start_all();

  RankProcess& operator[](int rank) { return *ranks_.at(rank); }
  int size() const { return world_size_; }
  int port() const { return port_; }
  std::map<std::string, std::string>& variables() { return variables_; }

 private:
  const std::string program_;
  const int world_size_;
  const std::vector<std::string> arguments_;
  const int port_;
  std::map<std::string, std::string> variables_;
  std::map<int, std::unique_ptr<RankProcess>> ranks_;
  std::vector<std::unique_ptr<RankProcess>> replaced_;
};

/// Returns a loopback port that was free at the time of the call.
int free_port();
