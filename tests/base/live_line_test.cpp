#include "base/live_line.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <latch>
#include <thread>

#include <gtest/gtest.h>

#include "support/forked.h"

// What a terminal shows is tested in tests/report/progress_terminal_test.cpp.

namespace lockstep {
namespace {

/// Standard output goes to /dev/null, so that tests can have a live line.
class LiveLines : public testing::Test {
 protected:
  void SetUp() override {
    std::fflush(nullptr);
    const int nowhere = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
    ::dup2(nowhere, STDOUT_FILENO);
    ::close(nowhere);
  }
  void TearDown() override {
    std::fflush(nullptr);
    ::dup2(before_, STDOUT_FILENO);
    ::close(before_);
  }

  const int before_ = ::dup(STDOUT_FILENO);
};

void use_the_live_line() {
  auto& line = LiveLine::of_process();
  line.begin(&line, LiveLine::Style::kEscapes);
  line.show(&line, "a line", 6);
  { LiveLine::Pause pause(STDOUT_FILENO); }
  line.end(&line);
}

TEST_F(LiveLines, DoNotMakeAForkedChildWaitForAThreadOfItsParent) {
  auto& line = LiveLine::of_process();
  line.begin(this, LiveLine::Style::kReturn);
  std::latch is_writing(1), has_forked(1);
  std::thread thread([&] {
    LiveLine::Pause pause(STDOUT_FILENO);
    is_writing.count_down();
    has_forked.wait();
  });
  is_writing.wait();
  EXPECT_EQ(exit_code_of_fork(use_the_live_line), 0);
  has_forked.count_down();
  thread.join();
  line.end(this);
}

TEST_F(LiveLines, DoNotMakeAnOwnerWaitForAThreadThatWrites) {
  auto& line = LiveLine::of_process();
  line.begin(this, LiveLine::Style::kReturn);
  std::latch is_writing(1), has_shown(1);
  std::thread thread([&] {
    LiveLine::Pause pause(STDOUT_FILENO);
    is_writing.count_down();
    has_shown.wait();
  });
  is_writing.wait();
  line.show(this, "a line", 6);  // returns, while the other thread writes
  has_shown.count_down();
  thread.join();
  line.end(this);
}

TEST_F(LiveLines, DoNotMakeErrorsWaitForOutputToALauncher) {
  auto& line = LiveLine::of_process();
  line.begin(this, LiveLine::Style::kReturn);
  {
    LiveLine::Pause output(STDOUT_FILENO);
    LiveLine::Pause errors(STDERR_FILENO);  // another pipe, which the live line is not in
  }
  line.end(this);
}

TEST_F(LiveLines, RestoreTheTerminateHandlerAfterTheLastOne) {
  const auto before = std::get_terminate();
  auto& line = LiveLine::of_process();
  int inner = 0;
  line.begin(this, LiveLine::Style::kEscapes);
  EXPECT_NE(std::get_terminate(), before);
  line.begin(&inner, LiveLine::Style::kEscapes);
  line.end(&inner);
  EXPECT_NE(std::get_terminate(), before);
  line.end(this);
  EXPECT_EQ(std::get_terminate(), before);
}

}  // namespace
}  // namespace lockstep
