#pragma once

#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Programs that this process contains, by their paths: what they do with their arguments. A RankProcess of one of them
/// is forked and calls the function. It does not have to load LibTorch, which takes most of a second of computing time.
/// Register only while this process has a single thread.
using ProgramFunction = int (*)(const std::vector<std::string>& arguments);
std::map<std::string, ProgramFunction>& contained_programs();

/// A process of its own that a test starts, talks to by lines, and ends: it never outlives the object.
class RankProcess {
 public:
  using Clock = std::chrono::steady_clock;

  /// Starts the program; `variables` are added to this process's environment, an empty value removes one.
  RankProcess(const std::vector<std::string>& command, const std::map<std::string, std::string>& variables);
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  int pid() const { return pid_; }

  /// The first line, from where the last call stopped, that begins so; a test failure and an empty string when it does
  /// not come in time.
  std::string expect_line(const std::string& beginning, std::chrono::milliseconds limit = std::chrono::seconds(30));

  void say(const std::string& line);
  void signal(int number);

  /// The exit code, or 128 and the signal; a test failure and -1 when it does not end in time.
  int wait(std::chrono::milliseconds limit = std::chrono::seconds(30));

  /// All that it has printed to both streams so far.
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

/// The ranks of one job, each a process that runs `program scenario arguments...` and meets the others on a port of its
/// own.
class JobProcesses {
 public:
  JobProcesses(std::string program, int world_size, std::vector<std::string> arguments,
               std::map<std::string, std::string> variables = {});

  /// Starts a rank; one that is started twice is a duplicate.
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

/// A port of this host's loopback that nobody listened on a moment ago.
int free_port();
