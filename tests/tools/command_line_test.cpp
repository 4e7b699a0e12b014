// What `lockstep` says to a line that it cannot carry out.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "run/child_process.h"

namespace lockstep::tool {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

/// Both streams, and on the last line the exit code.
std::string said_to(const std::string& line) {
  const auto ran =
      run_program({"/bin/sh", "-c", LOCKSTEP_TOOL " " + line + " 2>&1; echo $?"}, std::chrono::seconds(60));
  EXPECT_EQ(ran.failure, "");
  return ran.output;
}

TEST(CommandLine, NamesTheCommandsWhenNoneIsGiven) {
  EXPECT_THAT(said_to(""), AllOf(StartsWith("lockstep: a command is required: run, doctor, env"),
                                 HasSubstr("See lockstep --help.\n2\n")));
}

TEST(CommandLine, SuggestsTheNearestCommand) {
  EXPECT_EQ(said_to("docter"), "lockstep: unknown command docter. Did you mean doctor? See lockstep --help.\n2\n");
}

TEST(CommandLine, SuggestsTheCommandThatOthersCallSo) {
  EXPECT_EQ(said_to("checkpoint compare a.pt b.pt"),
            "lockstep: unknown command compare. Did you mean diff? See lockstep checkpoint --help.\n2\n");
  EXPECT_EQ(said_to("diagnose"), "lockstep: unknown command diagnose. Did you mean doctor? See lockstep --help.\n2\n");
  EXPECT_EQ(said_to("checkpoint check"),
            "lockstep: unknown command check. Did you mean verify? See lockstep checkpoint --help.\n2\n");
  EXPECT_EQ(said_to("validate"), "lockstep: unknown command validate. See lockstep --help.\n2\n");
}

TEST(CommandLine, PointsToTheHelpOfTheCommandThatWasGiven) {
  EXPECT_EQ(said_to("completion"), "lockstep: shell is required. See lockstep completion --help.\n2\n");
  EXPECT_THAT(said_to("env --nothing"), AllOf(HasSubstr("--nothing"), HasSubstr("See lockstep env --help.\n2\n")));
}

TEST(CommandLine, NamesTheCommandsOfACommand) {
  EXPECT_EQ(said_to("checkpoint"),
            "lockstep: a command is required: ls, show, verify, diff, convert, prune. See lockstep checkpoint "
            "--help.\n2\n");
  EXPECT_EQ(said_to("checkpoint verfy x.pt"),
            "lockstep: unknown command verfy. Did you mean verify? See lockstep checkpoint --help.\n2\n");
  EXPECT_EQ(said_to("checkpoint show"), "lockstep: file is required. See lockstep checkpoint show --help.\n2\n");
}

TEST(CommandLine, TakesHelpForACommandToo) {
  EXPECT_EQ(said_to("help run"), said_to("run --help"));
  EXPECT_EQ(said_to("help"), said_to("--help"));
  EXPECT_EQ(said_to("help docter"), said_to("docter"));
  EXPECT_EQ(said_to("help checkpoint"), said_to("checkpoint --help"));
  EXPECT_EQ(said_to("help checkpoint ls"), said_to("checkpoint ls --help"));
  EXPECT_EQ(said_to("help checkpoint verfy"), said_to("checkpoint verfy"));
}

TEST(CommandLine, PrintsHelpForLockstepAndForEachCommand) {
  EXPECT_THAT(said_to("--help"), AllOf(HasSubstr("\nUsage: lockstep COMMAND [OPTIONS]\n"), HasSubstr("\n0\n")));
  EXPECT_THAT(said_to("run -h"),
              AllOf(HasSubstr("\nUsage: lockstep run [OPTIONS] PROGRAM [ARGUMENT...]\n"), HasSubstr("\n0\n")));
  EXPECT_THAT(said_to("checkpoint -h"), HasSubstr("\nUsage: lockstep checkpoint COMMAND [OPTIONS]\n"));
  EXPECT_THAT(said_to("checkpoint diff -h"), HasSubstr("\nUsage: lockstep checkpoint diff [OPTIONS] A B\n"));
}

TEST(CommandLine, TakesStreamsInEverySpelling) {
  for (const auto* spelling : {"-t1", "-t 1", "-t=1", "--tee 1", "--tee=1", "-t", "--tee"})
    EXPECT_THAT(said_to(std::string("run --dry-run --log-dir logs ") + spelling + " true"), HasSubstr("\n0\n"))
        << spelling;
}

}  // namespace
}  // namespace lockstep::tool
