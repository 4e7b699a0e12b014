// `lockstep run` as a user sees it: flags, environment, output, exit codes.

#include <sched.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/temporary_folder.h"
#include "support/terminal.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing::UnorderedElementsAre;

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Run, StartsEachRankWithItsEnvironment) {
  auto run = run_launcher({"-n", "2", "--", "sh", "-c",
                           "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $NODE_RANK $MASTER_ADDR "
                           "$LOCKSTEP_STORE_HOSTED $LOCKSTEP_RESTART_COUNT $TORCHELASTIC_RESTART_COUNT "
                           "${ROLE_NAME-none} ${CUDA_VISIBLE_DEVICES-none} $(stat -c %a $LOCKSTEP_SECRET_FILE) "
                           "$(stat -c %s $LOCKSTEP_SECRET_FILE) $(stat -c %a $(dirname $LOCKSTEP_SECRET_FILE))"});
  EXPECT_EQ(run.code, 0) << run.output;
  EXPECT_THAT(lines_after(run.output, "["),
              UnorderedElementsAre("0] 0 0 2 2 0 0 127.0.0.1 1 0 0 none none 600 32 700",
                                   "1] 1 1 2 2 0 0 127.0.0.1 1 0 0 none none 600 32 700"));
}

TEST(Run, SetsThreadsUnlessTheyAreSet) {
  const std::vector<std::string> show{"-n", "4", "sh", "-c", "echo $OMP_NUM_THREADS"};
  cpu_set_t all, one;  // four ranks on one core, whatever this machine has
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core)
    if (CPU_ISSET(core, &all)) CPU_SET(core, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_THAT(run_launcher(show).output, HasSubstr("[3] 1\n"));
  ASSERT_EQ(::sched_setaffinity(0, sizeof all, &all), 0);
  EXPECT_THAT(run_launcher(show, {{"OMP_NUM_THREADS", "7"}}).output, HasSubstr("[3] 7\n"));
  EXPECT_THAT(run_launcher({"--omp_threads=5", "sh", "-c", "echo $OMP_NUM_THREADS"}, {{"OMP_NUM_THREADS", "7"}}).output,
              HasSubstr("[0] 5\n"));
}

TEST(Run, LeavesVisibleGpusAlone) {
  auto run = run_launcher({"-n2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"}, {{"CUDA_VISIBLE_DEVICES", "3,5"}});
  EXPECT_THAT(lines_after(run.output, "["), UnorderedElementsAre("0] 3,5", "1] 3,5"));
  run = run_launcher({"-n", "gpu", "sh", "-c", "echo $WORLD_SIZE"}, {{"CUDA_VISIBLE_DEVICES", "3,5,7"}});
  EXPECT_THAT(run.output, HasSubstr("[2] 3\n"));
}

TEST(Run, TakesNamesWithDashOrUnderscoreAndThoseOfTorchrunFromTheEnvironment) {
  EXPECT_THAT(run_launcher({"--nproc_per_node", "2", "sh", "-c", "echo $WORLD_SIZE"}).output, HasSubstr("[1] 2\n"));
  EXPECT_THAT(run_launcher({"--nproc-per-node=2", "sh", "-c", "echo $WORLD_SIZE"}).output, HasSubstr("[1] 2\n"));
  EXPECT_THAT(run_launcher({"sh", "-c", "echo $WORLD_SIZE"}, {{"PET_NPROC_PER_NODE", "2"}}).output,
              HasSubstr("[1] 2\n"));
}

TEST(Run, PassesAllThatFollowsTheProgramToIt) {
  auto run = run_launcher({"--local-rank-argument", "sh", "-c", "for a; do echo \"<$a>\"; done", "sh", "-n", "--json",
                           "", "[a,b]", "run", "a b"});
  EXPECT_THAT(lines_after(run.output, "[0] "),
              ElementsAre("<-n>", "<--json>", "<>", "<[a,b]>", "<run>", "<a b>", "<--local_rank=0>"));
}

TEST(Run, SuggestsTheNearestOption) {
  auto run = run_launcher({"--max-restart", "2", "true"});
  EXPECT_EQ(run.code, 2);
  EXPECT_THAT(run.output, HasSubstr("Did you mean --max-restarts?"));
  run = run_launcher({"--nproc_per_nod=2", "true"});
  EXPECT_THAT(run.output, HasSubstr("Did you mean --nproc-per-node?"));
  EXPECT_EQ(run_launcher({"--nnodes", "few", "true"}).code, 2);
  EXPECT_EQ(run_launcher({}).code, 2);
}

TEST(Run, RefusesTimesThatAreNotNumbersOfSeconds) {
  for (const char* option : {"--grace", "--join-timeout", "--restart-delay"})
    for (const char* time : {"nan", "inf", "-1", "x", "1e300"}) {
      const auto run = run_launcher({option, time, "true"});
      EXPECT_EQ(run.code, 2) << option << ' ' << time;
      EXPECT_THAT(run.output, HasSubstr(std::string(option) + ": " + time + " is not valid: it must be a number"));
    }
  EXPECT_EQ(run_launcher({"--grace", "0.5", "true"}).code, 0);
}

TEST(Run, RefusesToStartWithTooFewOpenFiles) {
  RankProcess run({"sh", "-c", std::string("ulimit -n 40 && exec ") + LOCKSTEP_TOOL + " run -n 4 true"},
                  clean_environment());
  EXPECT_EQ(run.wait(), 70);
  EXPECT_THAT(run.output(), AllOf(HasSubstr("needs 44 open files for 4 workers"), HasSubstr("the limit is 40"),
                                  HasSubstr("ulimit -Hn")));
}

TEST(Run, RefusesAProgramThatIsNotThere) {
  auto run = run_launcher({"-n", "2", "./no-such-program"});
  EXPECT_EQ(run.code, 2);
  EXPECT_THAT(run.output, HasSubstr("cannot run ./no-such-program: No such file or directory"));
}

TEST(Run, BindsWorkersToDisjointCores) {
  if (::sysconf(_SC_NPROCESSORS_ONLN) < 2) GTEST_SKIP() << "two cores are needed";
  auto run = run_launcher({"-n", "2", "--bind", "sh", "-c", "grep Cpus_allowed_list /proc/self/status"});
  EXPECT_EQ(run.code, 0);
  auto first = lines_after(run.output, "[0] "), second = lines_after(run.output, "[1] ");
  ASSERT_EQ(first.size(), 1u);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_NE(first, second);
}

TEST(Run, UsesTheSecretFileItIsGiven) {
  TemporaryFolder folder;
  const auto path = (folder.path() / "secret").string();
  std::ofstream(path) << std::string(40, 's');
  auto run = run_launcher({"--secret-file", path, "sh", "-c", "echo $LOCKSTEP_SECRET_FILE"});
  EXPECT_EQ(run.code, 2);
  EXPECT_THAT(run.output, HasSubstr("chmod 600"));
  std::filesystem::permissions(path, std::filesystem::perms(0600));
  run = run_launcher({"--secret-file", path, "sh", "-c", "echo $LOCKSTEP_SECRET_FILE"});
  EXPECT_THAT(run.output, HasSubstr("[0] " + path + "\n"));
}

TEST(Run, LeavesNoSecretBehind) {
  TemporaryFolder folder;
  run_launcher({"-n", "2", "true"}, {{"TMPDIR", folder.path().string()}});
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Run, ListensAtThePortItIsGivenOrNamesWhoHasIt) {
  const auto port = std::to_string(free_port());
  auto run = run_launcher({"--master-port", port, "sh", "-c", "echo $MASTER_PORT"});
  EXPECT_THAT(run.output, HasSubstr("[0] " + port + "\n"));
  RankProcess owner(run_command({"--master-port", port, LAUNCHED, "told"}), clean_environment());
  owner.expect_line("[0] started");
  run = run_launcher({"--master-port", port, "true"});
  EXPECT_EQ(run.code, 70);
  EXPECT_THAT(run.output, AllOf(HasSubstr(port), HasSubstr("pid " + std::to_string(owner.pid()))));
  owner.signal(SIGTERM);
  EXPECT_EQ(owner.wait(), 6);
}

TEST(Run, TwoJobsAtOnceChooseDifferentPorts) {
  RankProcess one(run_command({LAUNCHED, "told"}), clean_environment());
  one.expect_line("[0] started");
  EXPECT_EQ(run_launcher({"--standalone", "true"}).code, 0);
  one.signal(SIGTERM);
  EXPECT_EQ(one.wait(), 6);
}

// --- output

TEST(RunOutput, PassesOnEveryLineWholeAndInTheOrderOfItsRank) {
  constexpr int kRanks = 4, kLines = 10000;
  auto run = run_launcher({"-n", "4", LAUNCHED, "lines", std::to_string(kLines)});
  ASSERT_EQ(run.code, 0);
  size_t total = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto name = std::to_string(rank);
    auto lines = lines_after(run.output, "[" + name + "] line " + name + " ");
    int next[2] = {0, 1};  // even ones go to stdout, odd ones to stderr
    for (const auto& line : lines) {
      const int number = std::atoi(line.c_str());
      ASSERT_EQ(number, next[number % 2]) << "rank " << rank;
      ASSERT_EQ(line, std::to_string(number) + " " + std::string(number % 97, 'x') + " end");
      next[number % 2] += 2;
    }
    EXPECT_EQ(lines.size(), static_cast<size_t>(kLines));
    total += lines.size();
  }
  EXPECT_EQ(static_cast<size_t>(std::count(run.output.begin(), run.output.end(), '\n')), total) << "nothing else";
}

TEST(RunOutput, KeepsALastLineThatHasNoEnd) {
  auto run = run_launcher({"-n", "2", "sh", "-c", "printf out; printf err >&2"});
  EXPECT_THAT(lines_after(run.output, "["), UnorderedElementsAre("0] out", "0] err", "1] out", "1] err"));
}

TEST(RunOutput, ShowsAProgressBarBeforeItsLineEnds) {
  TemporaryFolder folder;
  const auto go = (folder.path() / "go").string();
  RankProcess run(
      run_command({"-n", "1", "sh", "-c",
                   "printf '\\r10 %%'; while [ ! -e " + go + " ]; do sleep 0.01; done; printf '\\r99 %%\\n'"}),
      clean_environment());
  EXPECT_EQ(run.expect_line("[0] 10 %"), "[0] 10 %");
  std::ofstream(go) << "";
  EXPECT_EQ(run.expect_line("[0] 99 %"), "[0] 99 %");
  EXPECT_EQ(run.wait(), 0);
}

/// What the launcher writes to a terminal.
std::string on_terminal(const std::vector<std::string>& arguments, std::map<std::string, std::string> variables = {}) {
  variables.emplace("TERM", "xterm");
  TerminalProcess process(run_command(arguments), 80, clean_environment(variables));
  process.wait();
  return process.bytes();
}

TEST(RunOutput, OverwritesAProgressBarOnATerminal) {
  const auto output = on_terminal({"-n", "1", "printf", "\\r10 %%\\r20 %%\\nend\\n"}, {{"NO_COLOR", "1"}});
  EXPECT_THAT(output, AllOf(HasSubstr("[0] 20 %"), HasSubstr("[0] end"), Not(HasSubstr("10 %\n"))));
}

TEST(RunOutput, ColoursThePrefixOnATerminalOnly) {
  const std::vector<std::string> greeting{"-n", "2", "echo", "hello"}, failing{"-n", "2", "false"};
  const std::map<std::string, std::string> colourless{{"NO_COLOR", "1"}};
  const auto output = on_terminal(greeting);
  EXPECT_THAT(output, AllOf(HasSubstr("\033[36m[0]\033[0m hello"), HasSubstr("\033[32m[1]\033[0m hello")));
  EXPECT_THAT(output, Not(HasSubstr("\033[1;31m"))) << "red is for failures";
  EXPECT_THAT(on_terminal(failing), ContainsRegex("\033\\[1;31mlockstep run: rank . .*failed first"));
  EXPECT_THAT(on_terminal(greeting, colourless), AllOf(HasSubstr("[1] hello"), Not(HasSubstr("\033"))));
  EXPECT_THAT(on_terminal(failing, colourless), Not(HasSubstr("\033")));
  EXPECT_THAT(run_launcher(greeting).output, Not(HasSubstr("\033")));
}

TEST(RunOutput, MayBeClosed) {
  for (const char* closed : {"<&-", ">&-", "2>&-", "<&- >&- 2>&-"}) {
    const TemporaryFolder folder;
    const auto log = folder.path() / "log";
    RankProcess shell({"sh", "-c", std::string("exec \"$0\" \"$@\" ") + closed, LOCKSTEP_TOOL, "run", "-n", "2",
                       "--log-dir", log.string(), "sh", "-c", "echo hello; echo trouble >&2"},
                      clean_environment());
    EXPECT_EQ(shell.wait(), 0) << closed << '\n' << shell.output();
    int files = 0;
    for (const auto& file : std::filesystem::recursive_directory_iterator(log))
      if (file.is_regular_file()) {
        EXPECT_THAT(contents(file.path()), testing::AnyOf("hello\n", "trouble\n")) << closed << ' ' << file.path();
        ++files;
      }
    EXPECT_EQ(files, 4) << closed;
  }
}

TEST(RunOutput, WritesAFileForEachStreamOfEachAttempt) {
  TemporaryFolder folder;
  const auto logs = (folder.path() / "a/b").string();
  auto run = run_launcher({"-n", "2", "--log-dir", logs, "--max-restarts", "1", "--restart-delay", "0.01", "sh", "-c",
                           "echo out $RANK; printf 'err' >&2; exit $((1 - LOCKSTEP_RESTART_COUNT))"});
  EXPECT_EQ(run.code, 0) << run.output;
  EXPECT_EQ(contents(logs + "/1/0/stdout"), "out 0\n");
  EXPECT_EQ(contents(logs + "/1/1/stdout"), "out 1\n");
  EXPECT_EQ(contents(logs + "/1/1/stderr"), "err");
  EXPECT_THAT(contents(logs + "/0/0/stdout") + contents(logs + "/0/1/stdout"), HasSubstr("out"));
  EXPECT_THAT(run.output, HasSubstr("[1] out 1\n"));
}

// A folder for logs may be one that other users write to.
TEST(RunOutput, RefusesAFileThatIsNotItsOwn) {
  TemporaryFolder folder;
  const auto logs = folder.path() / "logs", file = logs / "0/0/stdout", target = folder.path() / "target";
  std::ofstream(target) << "precious";
  std::filesystem::create_directories(file.parent_path());
  const auto expect_refused = [&](const std::string& why) {
    const auto run = run_launcher({"--log-dir", logs, "echo", "out"});
    EXPECT_NE(run.code, 0);
    EXPECT_THAT(run.output, AllOf(HasSubstr(file), HasSubstr(why), HasSubstr("--log-dir")));
    EXPECT_EQ(contents(target), "precious");
    std::filesystem::remove(file);
  };
  ASSERT_EQ(::mkfifo(file.c_str(), 0666), 0);
  expect_refused("not a regular file");
  std::filesystem::create_symlink(target, file);
  expect_refused("not a regular file");
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  std::ofstream(file) << "another's";
  ASSERT_EQ(::chown(file.c_str(), 54321, static_cast<gid_t>(-1)), 0);
  expect_refused("user 54321");
}

TEST(RunOutput, GoesToFilesAloneWhenRedirected) {
  TemporaryFolder folder;
  const auto logs = folder.path().string();
  const std::vector<std::string> say{"sh", "-c", "echo out; echo err >&2"};
  auto with = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"-n", "2", "--log-dir", logs});
    flags.insert(flags.end(), say.begin(), say.end());
    return lines_after(run_launcher(flags).output, "");
  };
  EXPECT_THAT(with({"--redirects"}), ElementsAre());
  EXPECT_EQ(contents(logs + "/0/1/stdout"), "out\n");
  EXPECT_THAT(with({"-r", "1"}), UnorderedElementsAre("[0] err", "[1] err"));
  EXPECT_THAT(with({"--redirects", "--tee", "1:2"}), UnorderedElementsAre("[1] err"));
  EXPECT_THAT(with({"--local-ranks-filter", "1", "-r", "2"}), UnorderedElementsAre("[1] out"));
  EXPECT_THAT(with({"--local-ranks-filter=0,1", "-r", "2"}), UnorderedElementsAre("[0] out", "[1] out"));
}

TEST(RunOutput, PutsTheRoleIntoThePrefix) {
  EXPECT_EQ(run_launcher({"--role", "trainer", "sh", "-c", "echo $ROLE_NAME $ROLE_RANK"}).output,
            "[trainer 0] trainer 0\n");
}

TEST(RunOutput, GoesOnWhenNobodyReadsIt) {
  RankProcess shell({"sh", "-c", std::string(LOCKSTEP_TOOL) + " run -n 2 " + LAUNCHED + " lines 5000 | true; echo end"},
                    clean_environment());
  shell.expect_line("end");
  EXPECT_EQ(shell.wait(), 0);
}

// --- plans and reports for programs

TEST(RunJson, PrintsThePlanAndStartsNothing) {
  TemporaryFolder folder;
  const auto witness = (folder.path() / "witness").string();
  auto run = run_launcher({"-n", "2", "--dry-run", "touch", witness});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.output, AllOf(StartsWith("[0] "), HasSubstr("RANK=1 "), HasSubstr("touch " + witness)));
  run = run_launcher({"-n", "2", "--dry-run", "--json", "touch", witness});
  auto plan = nlohmann::json::parse(run.output);
  EXPECT_EQ(plan["workers"][1]["environment"]["RANK"], "1");
  EXPECT_EQ(plan["workers"][0]["command"], (std::vector<std::string>{"touch", witness}));
  EXPECT_FALSE(std::filesystem::exists(witness));
}

TEST(RunJson, EndsWithTheReportAsOneLine) {
  auto run =
      run_launcher({"-n", "2", "--json", "sh", "-c", "echo no data >&2; [ $RANK = 0 ] || exit 7; exec sleep 60"});
  EXPECT_EQ(run.code, 3);
  auto report = nlohmann::json::parse(lines_after(run.output, "").back());
  EXPECT_EQ(report["exit_code"], 3);
  EXPECT_EQ(report["culprit"]["rank"], 1);
  EXPECT_EQ(report["culprit"]["exit_code"], 7);
  EXPECT_EQ(report["culprit"]["stderr_tail"], std::vector<std::string>{"no data"});
  EXPECT_EQ(report["consequences"][0]["signal"], SIGTERM);
  report = nlohmann::json::parse(lines_after(run_launcher({"--json", "true"}).output, "").back());
  EXPECT_EQ(report["exit_code"], 0);
}

TEST(Run, StartsAndEndsAThousandWorkers) {
  // More files than the soft limit allows: the launcher raises its own, and workers have the limit that it was given.
  RankProcess shell({"sh", "-c", "ulimit -Sn 512; exec " LOCKSTEP_TOOL " run -n 1024 sh -c 'ulimit -Sn'"},
                    clean_environment());
  EXPECT_EQ(shell.wait(60s), 0);
  const auto lines = lines_after(shell.output(), "[");
  EXPECT_EQ(lines.size(), 1024u);
  for (const auto& line : lines) EXPECT_THAT(line, testing::EndsWith("] 512"));
}

TEST(Run, StartsInMilliseconds) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < 11; ++i) {
    const auto begin = Clock::now();
    ASSERT_EQ(run_launcher({"-n", "1", "true"}).code, 0);
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  std::sort(times.begin(), times.end());
  std::cout << "lockstep run -n 1 true: median " << times[5] << " ms, least " << times[0] << " ms\n";
  EXPECT_LT(times[5], 500);
}

}  // namespace
}  // namespace lockstep
