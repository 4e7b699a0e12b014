// `lockstep ui` as a process.

#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep::ui {
namespace {

using testing::HasSubstr;

TEST(UiCommand, PrintsItsUrlAndEndsBySignals) {
  const TemporaryFolder folder;
  for (const int signal : {SIGINT, SIGTERM}) {
    RankProcess process({LOCKSTEP_TOOL, "ui", folder.path()}, {});
    EXPECT_THAT(process.expect_line("http://"),
                testing::ContainsRegex("^http://127.0.0.1:[0-9]+/\\?token=[0-9a-f]{32}"));
    process.signal(signal);
    EXPECT_EQ(process.wait(), 0) << signal;
    EXPECT_THAT(process.output(), testing::Not(HasSubstr("warning")));
  }
}

TEST(UiCommand, WarnsAboutOtherAddresses) {
  const TemporaryFolder folder;
  RankProcess process({LOCKSTEP_TOOL, "ui", folder.path(), "--address", "0.0.0.0"}, {});
  process.expect_line("lockstep ui: warning: 0.0.0.0 can be reached from other machines");
  process.signal(SIGINT);
  EXPECT_EQ(process.wait(), 0);
}

TEST(UiCommand, RefusesWhatItCannotServe) {
  const TemporaryFolder folder;
  const auto run = [](const std::vector<std::string>& arguments, int code, const std::string& part) {
    std::vector<std::string> command{LOCKSTEP_TOOL, "ui"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    RankProcess process(command, {});
    EXPECT_EQ(process.wait(), code);
    EXPECT_THAT(process.output(), HasSubstr(part));
  };
  run({"/nowhere"}, 2, "lockstep ui: /nowhere is no folder");
  run({folder.path(), "--port", "70000"}, 2, "--port");
  run({folder.path(), "--address", "192.0.2.1"}, 1, "cannot listen on 192.0.2.1");
}

}  // namespace
}  // namespace lockstep::ui
