// A program with a progress line, which tests start in a terminal. Each rank executes the commands in order, for
// example: test_ranks progress_program "begin=epoch 1/2,300" run=500 "print=a line" end

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/print.h>
#include <lockstep/process_group.h>
#include <lockstep/progress.h>
#include <lockstep/run_threads.h>

#include "base/log.h"
#include "ranks/test_ranks.h"

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

using Words = std::vector<std::string>;

/// "a,b" as a list, of at least three.
Words split(const std::string& list) {
  Words words(1);
  for (char c : list) c == ',' ? words.emplace_back() : (words.back() += c, words.back());
  words.resize(std::max<size_t>(words.size(), 3));
  return words;
}

int64_t number(const std::string& word) {
  return word.empty() ? 0 : std::stoll(word);
}

class Script {
 public:
  Script(const ProcessGroup& world, ProgressOptions options)
      : world_(world), options_(options), progress_(std::make_unique<Progress>(world, options)) {}

  void execute(const std::string& command) {
    const auto verb = command.substr(0, command.find('='));
    const auto rest = verb.size() == command.size() ? "" : command.substr(verb.size() + 1);
    const auto words = split(rest);
    if (verb == "begin") return progress_->begin(words[0], number(words[1]), number(words[2]));
    if (verb == "set") return progress_->set(words[0], std::stod(words[1]));
    if (verb == "run") return run(milliseconds(number(rest)), milliseconds(1));
    if (verb == "spin") return run(milliseconds(number(rest)), milliseconds(0));
    if (verb == "print") return print(world_, rest);
    if (verb == "log") return log_warning(rest);
    if (verb == "cout") return void(std::cout << rest << std::endl);
    if (verb == "end") return progress_->end(rest);
    if (verb == "inner") return inner(words[0]);
    if (verb == "fork") return fork_child();
    if (verb == "crowd") return crowd(number(words[0]), number(words[1]));
    if (verb == "background") return leave_foreground();
    if (verb == "touch") return void(std::ofstream(rest) << "");
    if (verb == "await") return await(rest);
    if (verb == "throw") throw std::runtime_error(rest);
    if (verb == "exit") std::exit(static_cast<int>(number(rest)));
    throw std::invalid_argument(command);
  }

 private:
  /// As a shell does with a job in the background.
  static void leave_foreground() {
    if (::setpgid(0, 0) != 0) throw std::runtime_error("setpgid");
  }

  /// Steps of a millisecond, or as many steps as possible, until the line can have been updated once per 100 ms: on a
  /// busy machine that takes longer.
  void run(milliseconds duration, milliseconds step) {
    auto updated = Clock::now();
    for (auto updates = duration / milliseconds(100); updates > 0;) {
      if (step.count() > 0) std::this_thread::sleep_for(step);
      if (const auto now = Clock::now(); now - updated > milliseconds(101)) {
        updated = now;
        --updates;
      }
      progress_->add_samples(32);
      progress_->advance();
    }
  }

  void inner(const std::string& title) {
    Progress inner(world_, options_);
    inner.begin(title, 1);
    inner.advance();
    inner.end();
  }

  /// Threads that print and log while this one makes steps.
  void crowd(int64_t threads, int64_t lines) {
    std::atomic<int64_t> running = threads;
    std::vector<std::thread> all;
    for (int64_t thread = 0; thread < threads; ++thread)
      all.emplace_back([&, thread] {
        for (int64_t line = 0; line < lines; ++line) {
          print(world_, "line ", thread, " ", line);
          log_warning("line " + std::to_string(thread) + " " + std::to_string(line));
        }
        --running;
      });
    while (running > 0) progress_->advance();
    for (auto& thread : all) thread.join();
  }

  void fork_child() {
    const pid_t child = ::fork();
    if (child == 0) {
      progress_->advance();
      progress_.reset();
      std::exit(0);
    }
    ::waitpid(child, nullptr, 0);
  }

  void await(const std::string& path) {
    while (!std::filesystem::exists(path)) std::this_thread::sleep_for(milliseconds(1));
  }

  const ProcessGroup world_;
  const ProgressOptions options_;
  std::unique_ptr<Progress> progress_;
};

}  // namespace

int run_progress_program(const Words& arguments) {
  auto commands = arguments;
  ProgressOptions options;
  options.line_interval = milliseconds(200);
  int threads = 0;
  if (!commands.empty() && commands[0].starts_with("threads=")) {
    threads = static_cast<int>(number(commands[0].substr(8)));
    commands.erase(commands.begin());
  }
  auto rank_main = [&](const ProcessGroup& world) {
    Script script(world, options);
    for (const auto& command : commands) script.execute(command);
  };
  if (threads > 0)
    run_threads(threads, rank_main);
  else
    rank_main(init_process_group({.device = torch::Device("cpu")}));
  return 0;
}
