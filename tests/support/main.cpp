#include <iostream>

#include <gtest/gtest.h>

namespace {

// Prints why a test was skipped, on a line that ./test collects: no test is skipped silently.
class SkipReporter final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    name_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  // Must not call GoogleTest: it holds its lock here.
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.skipped()) std::cout << "could not run: " << name_ << ": " << result.message() << std::endl;
  }

  std::string name_;
};

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new SkipReporter);
  const int result = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() > 0 || testing::GTEST_FLAG(list_tests)) return result;
  std::cout << "the filter '" << testing::GTEST_FLAG(filter) << "' selects no test" << std::endl;
  return 1;
}
