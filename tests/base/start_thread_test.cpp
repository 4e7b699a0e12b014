#include "base/start_thread.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>

#include <gtest/gtest.h>

namespace lockstep {
namespace {

class InBackground : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(InBackground, ABodyRunsThoughNobodyWaits) {
  std::promise<void> ran;
  run_in_background("a test", [&] { ran.set_value(); });
  EXPECT_EQ(ran.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
}

TEST_F(InBackground, TheEndOfTheProcessWaitsForIt) {
  const auto end = [] {
    static std::promise<void> exiting;
    run_in_background("a test", [] {
      exiting.get_future().wait();
      std::fputs("it is done", stderr);
    });
    std::atexit([] { exiting.set_value(); });  // the last to be registered is the first to be called
    std::exit(0);
  };
  EXPECT_EXIT(end(), testing::ExitedWithCode(0), "it is done");
}

/// Ends in the background, and says what came of it.
struct EndsInBackground {
  EndsInBackground() { prepare_background(); }
  ~EndsInBackground() {
    run_in_background("a test", [] { std::fputs("it is done", stderr); });
  }
};

TEST_F(InBackground, TheEndOfTheProcessWaitsForWhatAStaticVariableBegins) {
  const auto end = [] {
    static const EndsInBackground last;
    run_in_background("a test", [] {});  // the first use is after it
    std::exit(0);
  };
  EXPECT_EXIT(end(), testing::ExitedWithCode(0), "^it is done$");
}

TEST_F(InBackground, NothingBeginsAfterTheEndOfTheProcessHasWaited) {
  const auto end = [] {
    struct Late {
      ~Late() {
        static std::promise<void> began;
        run_in_background("a test", [] { began.set_value(); });
        if (began.get_future().wait_for(std::chrono::milliseconds(200)) == std::future_status::ready)
          std::fputs("too late", stderr);
      }
    };
    static const Late late;
    prepare_background();
    std::exit(0);
  };
  EXPECT_EXIT(end(), testing::ExitedWithCode(0), "^$");
}

TEST_F(InBackground, TheEndOfTheProcessDoesNotWaitForEver) {
  const auto end = [] {
    static std::promise<void> never;
    run_in_background("a test", [] { never.get_future().wait(); });
    std::exit(0);
  };
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EXIT(end(), testing::ExitedWithCode(0), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace lockstep
