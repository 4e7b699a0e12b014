// `lockstep test` itself, with the program that its ranks run.

#include <algorithm>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "launch/launcher_process.h"
#include "support/eventually.h"
#include "support/send_signal.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class TestCommand : public testing::Test {
 protected:
  /// Every process of the command, itself included, has the mark in its environment.
  std::unique_ptr<RankProcess> start(std::vector<std::string> arguments,
                                     std::map<std::string, std::string> variables = {}) {
    arguments.insert(arguments.begin(), {LOCKSTEP_TOOL, "test"});
    variables.emplace("LOCKSTEP_TEST_MARK", std::to_string(::getpid()));
    return std::make_unique<RankProcess>(arguments, clean_environment(variables));
  }

  Finished run(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& variables = {}) {
    auto process = start(arguments, variables);
    const int code = process->wait(120s);
    return {code, process->output()};
  }

  std::vector<int> processes() const { return processes_with("LOCKSTEP_TEST_MARK=" + std::to_string(::getpid())); }

  /// The rank's process, as soon as it is there.
  int pid_of(int rank) const {
    int pid = 0;
    EXPECT_TRUE(eventually(
        [&] {
          const auto ranks = processes_with("RANK=" + std::to_string(rank));
          for (int one : processes())
            if (std::find(ranks.begin(), ranks.end(), one) != ranks.end()) pid = one;
          return pid != 0;
        },
        60s));
    return pid;
  }

  /// A program in the place of lockstep-selftest.
  std::string write_program(const std::string& script) const {
    const auto path = folder_.path() / "selftest";
    std::ofstream(path) << "#!/bin/sh\n" << script;
    std::filesystem::permissions(path, std::filesystem::perms(0700));
    return path.string();
  }

  /// lockstep-selftest with a shorter list of backends, for which LibTorch is not loaded.
  std::string write_selftest(const std::string& backends) const {
    return write_program("[ $1 = --list ] && echo " + backends + " && exit\nexec " SELFTEST " \"$@\"\n");
  }

  TemporaryFolder folder_;
};

constexpr const char* kGlooAndThreads = "gloo processes threads threads";

TEST_F(TestCommand, PassesWithRanksAsProcessesAndAsThreads) {
  const auto ran = run({"--selftest", write_selftest(kGlooAndThreads), "-n", "3", "--backends", "threads,gloo"});
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, ContainsRegex("  ok       threads  3 threads of one process, [0-9.]+ s\n"
                                        "  ok       gloo     3 processes, [0-9.]+ s\n"
                                        "\n2 passed, 0 failed\n$"));
}

TEST_F(TestCommand, PrintsAnObjectForEachBackendThatTheBuildHas) {
  RankProcess list({SELFTEST, "--list"}, {});
  ASSERT_EQ(list.wait(), 0);
  const auto ran = run({"--json", "-n", "1"});
  std::map<std::string, json> objects;
  bool all_passed = true;  // mpi cannot without mpirun
  for (const auto& line : lines_after(ran.output, "{")) {
    const auto object = json::parse("{" + line);
    objects[object["backend"].get<std::string>()] = object;
    all_passed = all_passed && object["passed"].get<bool>();
  }
  EXPECT_EQ(ran.code, all_passed ? 0 : 1) << ran.output;
  for (const auto& line : lines_after(list.output(), ""))
    EXPECT_TRUE(objects.contains(line.substr(0, line.find(' ')))) << line << "\n" << ran.output;
  if (all_passed) {
    EXPECT_EQ(lines_after(ran.output, "").size(), objects.size()) << ran.output;
  }
  auto gloo = objects["gloo"];
  EXPECT_EQ(gloo["ranks"], 1);
  EXPECT_EQ(gloo["passed"], true);
  EXPECT_GT(gloo["seconds"], 0);
  EXPECT_LT(gloo["seconds"], 60);
  EXPECT_TRUE(gloo["failure"].is_null());
}

TEST_F(TestCommand, SaysWhatIsWrongWithABackendAndGoesOnToTheNext) {
  const auto ran = run({"--selftest", write_selftest(kGlooAndThreads)}, {{"LOCKSTEP_INTERFACE", "nosuch0"}});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, AllOf(ContainsRegex("  error    gloo     2 processes, .*: rank [01]: backend gloo"),
                                HasSubstr("-> run `lockstep doctor`"), HasSubstr("  ok       threads  2 threads"),
                                HasSubstr("1 passed, 1 failed\n\nOutput of the ranks of gloo:\n["),
                                HasSubstr("gloo cannot listen on interface nosuch0")));
}

TEST_F(TestCommand, NamesTheRankThatWasKilled) {
  auto command = start({"--selftest", write_selftest("gloo processes"), "--json"});
  const int victim = pid_of(1);
  ASSERT_TRUE(send_signal(victim, SIGKILL));
  EXPECT_EQ(command->wait(), 1);
  const auto line = json::parse(command->expect_line("{"));
  EXPECT_THAT(line["failure"].get<std::string>(),
              AllOf(HasSubstr("rank 1 (pid " + std::to_string(victim)), HasSubstr("killed by SIGKILL")));
  EXPECT_THAT(line["remedy"].get<std::string>(), HasSubstr("memory"));
}

TEST_F(TestCommand, SurvivesACrashOfOneBackend) {
  const auto program = write_program(
      "[ $1 = --list ] && echo crash processes && echo good processes && exit\n"
      "[ $1 = good ] || kill -SEGV $$\n");
  const auto ran = run({"--selftest", program});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, AllOf(ContainsRegex("error    crash  2 processes, .*: rank [01] \\(pid"),
                                HasSubstr("killed by SIGSEGV"), HasSubstr("lockstep env"),
                                HasSubstr("  ok       good   2 processes"), HasSubstr("1 passed, 1 failed\n")));
}

// As it is with mpi, but over a backend that every build has.
TEST_F(TestCommand, StartsRanksByMpirunWhereTheBackendNeedsIt) {
  const auto program = write_selftest("gloo mpirun");
  const auto missing = run({"--selftest", program}, {{"PATH", "/nowhere"}});
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.output, AllOf(HasSubstr("no program mpirun in PATH"), HasSubstr("-> install Open MPI")));
  if (std::system("mpirun --version >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "mpirun is not installed (apt-get install openmpi-bin)";
  const auto ran = run({"--selftest", program, "-n", "3"});
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("  ok       gloo  3 processes of mpirun, "));
  const auto broken = run({"--selftest", program, "--json"}, {{"LOCKSTEP_INTERFACE", "nosuch0"}});
  EXPECT_EQ(broken.code, 1);
  EXPECT_THAT(broken.output, HasSubstr("\"failure\":\"rank "));
  EXPECT_THAT(broken.output, HasSubstr("gloo cannot listen on interface nosuch0"));
}

TEST_F(TestCommand, KillsRanksThatDoNotEndInTime) {
  const auto program = write_program("[ $1 = --list ] && echo slow processes && exit\nexec sleep 60\n");
  const auto ran = run({"--selftest", program, "--timeout", "0.5"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, AllOf(HasSubstr("did not finish within 0.5 s and were killed"), HasSubstr("--timeout")));
  EXPECT_TRUE(eventually([&] { return processes().empty(); }, 2s));
}

TEST_F(TestCommand, LeavesNothingBehindWhenItIsKilled) {
  const auto program = write_program("[ $1 = --list ] && echo slow processes && exit\nexec sleep 60\n");
  auto command = start({"--selftest", program});
  pid_of(1);
  command->signal(SIGKILL);
  EXPECT_TRUE(eventually([&] { return processes().empty(); }, 2s));
}

TEST_F(TestCommand, RefusesABackendThatThereIsNot) {
  const auto ran = run({"--selftest", write_selftest(kGlooAndThreads), "--backends", "gloo,carrier-pigeon"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.output,
              AllOf(HasSubstr("unknown backend \"carrier-pigeon\""), HasSubstr("gloo"), HasSubstr("threads")));
  EXPECT_THAT(ran.output, Not(HasSubstr("passed"))) << "nothing is started";
}

TEST_F(TestCommand, RefusesNumbersThatMakeNoSense) {
  for (const char* wrong : {"0", "-1", "two"}) EXPECT_EQ(run({"-n", wrong}).code, 2) << wrong;
  EXPECT_EQ(run({"--timeout", "0"}).code, 2);
}

TEST_F(TestCommand, SaysWhereItLooksForTheProgramOfTheRanks) {
  const auto ran = run({"--selftest", "/nowhere"});
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.output, HasSubstr("/nowhere could not be started: No such file"));
}

}  // namespace
}  // namespace lockstep
