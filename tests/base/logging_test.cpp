#include <lockstep/logging.h>

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <latch>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/log.h"

namespace lockstep {
namespace {

using Lines = std::vector<std::pair<LogLevel, std::string>>;

/// Every claim starts without a launcher, at the level warning, on stderr.
class Logging : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* variable : {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
                                 "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "LOCKSTEP_LOG", "NO_COLOR"})
      unsetenv(variable);
    // The environment is read at the first use of the log: these claims need a process of their own.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }

  void TearDown() override {
    SetUp();
    set_log_sink({});
    set_log_level(LogLevel::kWarning);
  }
};

std::string on_stderr(const std::function<void()>& act) {
  testing::internal::CaptureStderr();
  act();
  return testing::internal::GetCapturedStderr();
}

void log_every_level() {
  log_debug("d");
  log_info("i");
  log_warning("w");
  log_error("e");
}

TEST_F(Logging, AsynchronousLinesDoNotWaitForTheReader) {
  std::latch may_write(1);
  std::latch last_is_written(1);
  std::vector<std::string> written;
  set_log_sink([&](LogLevel, const std::string& line) {
    may_write.wait();
    written.push_back(line);
    if (line.ends_with("were dropped")) log_warning_async("the last");  // the writer continues
    if (line == "the last") last_is_written.count_down();
  });
  for (int line = 0; line < 150; ++line) log_warning_async("line " + std::to_string(line));  // more than can wait
  EXPECT_TRUE(written.empty()) << "the sink blocks, this thread does not";
  may_write.count_down();
  last_is_written.wait();
  set_log_sink({});  // waits until the sink returns
  // 100 lines can wait. Where the writer took the first before the loop ended, one of the later lines had room too.
  ASSERT_GE(written.size(), 102U);
  ASSERT_LE(written.size(), 103U);
  const auto kept = written.size() - 2;
  for (size_t line = 0; line < 100; ++line) EXPECT_EQ(written[line], "line " + std::to_string(line));
  EXPECT_EQ(written[kept], std::to_string(150 - kept) + " lines of the log were dropped");
}

/// Ends the process of a claim: 0 when it holds, else 1 with what was found instead.
[[noreturn]] void claim(const std::string& actual, const std::string& expected) {
  if (actual != expected) std::cerr << "found: " << actual << "\nexpected: " << expected << '\n';
  std::_Exit(actual == expected ? 0 : 1);
}

TEST_F(Logging, ShowsWarningsAndErrorsByDefault) {
  EXPECT_EQ(log_level(), LogLevel::kWarning);
  EXPECT_EQ(on_stderr(log_every_level), "[lockstep] warning: w\n[lockstep] error: e\n");
}

TEST_F(Logging, ShowsTheLevelAndWhatIsAboveIt) {
  const std::vector<std::pair<LogLevel, std::string>> shown{{LogLevel::kDebug, "diwe"},
                                                            {LogLevel::kInfo, "iwe"},
                                                            {LogLevel::kWarning, "we"},
                                                            {LogLevel::kError, "e"},
                                                            {LogLevel::kOff, ""}};
  std::string seen;
  set_log_sink([&](LogLevel, const std::string& message) { seen += message; });
  for (const auto& [level, expected] : shown) {
    seen.clear();
    set_log_level(level);
    log_every_level();
    EXPECT_EQ(seen, expected);
    EXPECT_EQ(log_level(), level);
  }
}

TEST_F(Logging, NamesTheRankWhereALauncherGaveOne) {
  setenv("RANK", "2", 1);
  setenv("WORLD_SIZE", "4", 1);
  EXPECT_EQ(on_stderr([] { log_warning("late"); }), "[lockstep rank 2] warning: late\n");
  setenv("RANK", "3", 1);
  EXPECT_EQ(on_stderr([] { log_warning("late"); }), "[lockstep rank 3] warning: late\n");
}

TEST_F(Logging, StillWritesWhereTheRankIsSenseless) {
  setenv("RANK", "two", 1);
  EXPECT_EQ(on_stderr([] { log_warning("late"); }), "[lockstep] warning: late\n");
}

TEST_F(Logging, PrintsBracesAndPercentSignsAsTheyAre) {
  EXPECT_EQ(on_stderr([] { log_error("{} {0} { %v %s }"); }), "[lockstep] error: {} {0} { %v %s }\n");
}

TEST_F(Logging, GivesTheSinkTheBareLineInsteadOfStderr) {
  Lines lines;
  set_log_sink([&](LogLevel level, const std::string& message) { lines.emplace_back(level, message); });
  EXPECT_EQ(on_stderr(log_every_level), "");
  EXPECT_EQ(lines, (Lines{{LogLevel::kWarning, "w"}, {LogLevel::kError, "e"}}));
}

TEST_F(Logging, ReturnsToStderrForAnEmptySink) {
  Lines lines;
  set_log_sink([&](LogLevel level, const std::string& message) { lines.emplace_back(level, message); });
  set_log_sink({});
  EXPECT_EQ(on_stderr([] { log_warning("w"); }), "[lockstep] warning: w\n");
  EXPECT_TRUE(lines.empty());
}

TEST_F(Logging, WritesTheLineToStderrWhenTheSinkThrows) {
  set_log_sink([](LogLevel, const std::string&) { throw std::runtime_error("disk full"); });
  EXPECT_EQ(on_stderr([] { log_warning("w"); }), "[lockstep] warning: w\n");
}

TEST_F(Logging, LetsTheSinkReplaceItselfAndLog) {
  std::string seen;
  set_log_sink([&seen](LogLevel, const std::string& message) {
    set_log_sink([&seen](LogLevel, const std::string& inner) { seen += "second:" + inner + " "; });
    log_warning("from the sink");
    seen += "first:" + message;
  });
  log_warning("w");
  EXPECT_EQ(seen, "second:from the sink first:w");
}

TEST_F(Logging, CallsTheSinkForOneLineAtATime) {
  constexpr int kThreads = 4;
  constexpr int kLines = 500;
  int lines = 0;  // unguarded on purpose: the log must guard it
  std::atomic<int> inside = 0;
  int most_inside = 0;
  set_log_sink([&](LogLevel, const std::string& line) {
    most_inside = std::max(most_inside, ++inside);
    std::this_thread::yield();
    lines += line.find("own line") != std::string::npos;  // threads of other tests may still write
    --inside;
  });
  std::latch start(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      start.arrive_and_wait();
      for (int line = 0; line < kLines; ++line) log_warning("own line");
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(lines, kThreads * kLines);
  EXPECT_EQ(most_inside, 1);
}

TEST_F(Logging, KeepsTheLinesOfThreadsWhole) {
  constexpr int kThreads = 4;
  constexpr int kLines = 100;
  const std::string message(200, 'x');
  std::istringstream output(on_stderr([&] {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
      threads.emplace_back([&] {
        for (int line = 0; line < kLines; ++line) log_warning(message);
      });
    for (auto& thread : threads) thread.join();
  }));
  int lines = 0;
  for (std::string line; std::getline(output, line); ++lines) EXPECT_EQ(line, "[lockstep] warning: " + message);
  EXPECT_EQ(lines, kThreads * kLines);
}

TEST_F(Logging, StartsAtTheLevelOfTheEnvironment) {
  const std::vector<std::pair<const char*, LogLevel>> levels{{"debug", LogLevel::kDebug},
                                                             {"info", LogLevel::kInfo},
                                                             {"warning", LogLevel::kWarning},
                                                             {"error", LogLevel::kError},
                                                             {"off", LogLevel::kOff}};
  for (const auto& [name, level] : levels)
    EXPECT_EXIT(
        {
          setenv("LOCKSTEP_LOG", name, 1);
          claim(on_stderr([] { log_level(); }) + (log_level() == level ? name : "another level"), name);
        },
        testing::ExitedWithCode(0), "")
        << name;
}

TEST_F(Logging, WarnsOnceOfASenselessLevel) {
  for (const std::string value : {"loud", "", "WARNING", "2", "debug "})
    EXPECT_EXIT(
        {
          setenv("LOCKSTEP_LOG", value.c_str(), 1);
          claim(on_stderr(log_every_level), "[lockstep] warning: LOCKSTEP_LOG is \"" + value +
                                                "\": it must be debug, info, warning, error or off; using warning\n"
                                                "[lockstep] warning: w\n[lockstep] error: e\n");
        },
        testing::ExitedWithCode(0), "")
        << value;
}

/// The bytes that a warning writes to a terminal that can show colours.
std::string warning_on_a_terminal() {
  setenv("TERM", "xterm-256color", 1);
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) return "no terminal";
  const int line = open(ptsname(terminal), O_RDWR | O_NOCTTY);
  const int before = dup(STDERR_FILENO);
  dup2(line, STDERR_FILENO);
  log_warning("w");
  dup2(before, STDERR_FILENO);
  close(line);  // so that reading ends, line or no line
  std::string bytes;
  for (char byte = 0; read(terminal, &byte, 1) == 1;) bytes += byte;
  return bytes;
}

/// Some containers have no pseudo-terminals.
bool has_terminals() {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal >= 0) close(terminal);
  return terminal >= 0;
}

TEST_F(Logging, ColoursTheLevelOnATerminal) {
  if (!has_terminals()) GTEST_SKIP() << "needs a pseudo-terminal: mount devpts at /dev/pts";
  EXPECT_EXIT(
      {
        const std::string line = warning_on_a_terminal();
        const bool coloured = line.starts_with("[lockstep] \x1b[") && line.find("mwarning\x1b[") != line.npos;
        claim(coloured ? "coloured" : line, "coloured");
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(Logging, DoesNotColourWithNoColor) {
  if (!has_terminals()) GTEST_SKIP() << "needs a pseudo-terminal: mount devpts at /dev/pts";
  EXPECT_EXIT(
      {
        setenv("NO_COLOR", "1", 1);
        claim(warning_on_a_terminal(), "[lockstep] warning: w\r\n");
      },
      testing::ExitedWithCode(0), "");
}

TEST_F(Logging, DoesNotColourAFile) {
  EXPECT_EXIT(
      {
        setenv("TERM", "xterm-256color", 1);
        claim(on_stderr([] { log_warning("w"); }), "[lockstep] warning: w\n");
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lockstep
