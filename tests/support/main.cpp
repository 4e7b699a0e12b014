#include <iostream>

#include <gtest/gtest.h>

namespace {

// A skipped test says why on a line that ./test collects: no test is skipped silently.
class SkipReporter final : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.skipped()) return;
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    std::cout << "could not run: " << (test ? std::string(test->test_suite_name()) + "." + test->name() : "a suite")
              << ": " << result.message() << std::endl;
  }
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new SkipReporter);
  return RUN_ALL_TESTS();
}
