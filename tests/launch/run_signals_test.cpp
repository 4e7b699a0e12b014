// A launcher that is told to stop, and one that is killed: what its workers hear, and that nothing stays behind.

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <random>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/eventually.h"
#include "support/send_signal.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Clock = std::chrono::steady_clock;

RankProcess& started(RankProcess& launcher, int ranks) {
  for (int i = 0; i < ranks; ++i) launcher.expect_line("[");
  return launcher;
}

bool is_stopped(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line{std::istreambuf_iterator<char>(file), {}};
  return line.find(") T ") != line.npos;
}

TEST(RunSignals, PassesOnWhatItGetsAndExitsAsPreempted) {
  for (int number : {SIGTERM, SIGUSR1, SIGINT}) {
    RankProcess launcher(run_command({"-n", "2", "--max-restarts", "3", LAUNCHED, "told"}), clean_environment());
    started(launcher, 2).signal(number);
    EXPECT_EQ(launcher.wait(), 6) << launcher.output();
    const std::string heard = std::string("] got ") + ::sigabbrev_np(number);
    EXPECT_THAT(launcher.output(), AllOf(HasSubstr("[0" + heard), HasSubstr("[1" + heard), Not(HasSubstr("restart")),
                                         HasSubstr(std::string("stopped by SIG") + ::sigabbrev_np(number))));
  }
}

TEST(RunSignals, StopsAtOnceAtTheSecondCtrlC) {
  RankProcess launcher(run_command({"-n", "2", LAUNCHED, "stubborn"}), clean_environment());
  started(launcher, 2).signal(SIGINT);
  launcher.expect_line("lockstep run: stopping; press Ctrl-C again to kill the workers");
  const auto begin = Clock::now();
  launcher.signal(SIGINT);
  EXPECT_EQ(launcher.wait(), 6);
  EXPECT_LT(Clock::now() - begin, 2s);
}

TEST(RunSignals, KillsAfterTheGraceTimeWhatDoesNotStop) {
  RankProcess launcher(run_command({"-n", "2", "--grace", "0.2", LAUNCHED, "stubborn"}), clean_environment());
  started(launcher, 2).signal(SIGTERM);
  EXPECT_EQ(launcher.wait(40s), 6);
}

TEST(RunSignals, DoesNotRestartWhenToldToStopBetweenAttempts) {
  RankProcess launcher(run_command({"--max-restarts", "3", "--restart-delay", "60", "false"}), clean_environment());
  launcher.expect_line("lockstep run: rank 0");
  launcher.signal(SIGTERM);
  EXPECT_EQ(launcher.wait(40s), 6);
}

TEST(RunSignals, HearsThemWhileNobodyReadsItsOutput) {
  int pipes[2];
  ASSERT_EQ(::pipe(pipes), 0);  // which stays full
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(pipes[1], 1);
    ::execl(LOCKSTEP_TOOL, "lockstep", "run", "-n", "2", "--grace", "1", "yes", nullptr);
    ::_exit(127);
  }
  char byte;
  ASSERT_EQ(::read(pipes[0], &byte, 1), 1);
  const auto begin = Clock::now();
  ::kill(pid, SIGINT);
  ::kill(pid, SIGINT);
  ::close(pipes[1]);
  std::string rest(1 << 16, ' ');
  int status = 0;
  EXPECT_TRUE(eventually([&] {
    [[maybe_unused]] auto got = ::read(pipes[0], rest.data(), rest.size());
    return ::waitpid(pid, &status, WNOHANG) == pid;
  }));
  ::close(pipes[0]);
  EXPECT_LT(Clock::now() - begin, 5s);
  EXPECT_EQ(WEXITSTATUS(status), 6);
}

/// A launcher whose stdout is a pipe that nobody reads. Its stderr goes there too: `lockstep run ... 2>&1 | less`.
class UnreadLauncher {
 public:
  explicit UnreadLauncher(std::vector<std::string> arguments) {
    if (::pipe2(ends_, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    auto command = run_command(std::move(arguments));
    std::vector<char*> argv;
    for (auto& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::dup2(ends_[1], 1);
    ::dup2(ends_[1], 2);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ~UnreadLauncher() {
    if (!status_) ::kill(pid_, SIGKILL);
    if (!status_) ::waitpid(pid_, nullptr, 0);
    for (int end : ends_) ::close(end);
  }
  int pid() const { return pid_; }
  void read_one_byte() const {
    char byte = 0;
    ASSERT_EQ(::read(ends_[0], &byte, 1), 1);
  }
  bool is_full() const {
    pollfd writable{ends_[1], POLLOUT, 0};
    return ::poll(&writable, 1, 0) == 0;
  }
  /// The exit code; none when it has not ended in time.
  std::optional<int> wait(std::chrono::milliseconds limit) {
    int status = 0;
    if (!eventually([&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; }, limit)) return std::nullopt;
    status_ = WEXITSTATUS(status);
    return status_;
  }

 private:
  int ends_[2] = {-1, -1};
  pid_t pid_ = -1;
  std::optional<int> status_;
};

TEST(RunSignals, OneCtrlCEndsALauncherWhoseOutputNobodyReads) {
  for (int number : {SIGINT, SIGTERM}) {
    UnreadLauncher launcher({"-n", "2", "yes"});
    launcher.read_one_byte();
    ASSERT_TRUE(eventually([&] { return launcher.is_full(); }));
    ::kill(launcher.pid(), number);
    EXPECT_EQ(launcher.wait(15s), 6) << ::sigabbrev_np(number);
  }
}

TEST(RunSignals, CtrlCEndsALauncherThatHasOnlyItsUnreadOutputLeft) {
  TemporaryFolder folder;
  const auto done = folder.path() / "done";
  UnreadLauncher launcher({"sh", "-c", "seq 100000; touch " + done.string()});
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(done) && launcher.is_full(); }));
  ::kill(launcher.pid(), SIGINT);
  const auto code = launcher.wait(15s);  // the worker may have ended well, or be about to
  EXPECT_TRUE(code == 0 || code == 6) << code.value_or(-1);
}

TEST(RunSignals, EndsItWhileItStartsWorkers) {
  std::mt19937 random(7);
  for (int turn = 0; turn < 5; ++turn) {
    const std::string mark = "starts many " + std::to_string(::getpid()) + "." + std::to_string(turn);
    RankProcess launcher(run_command({"-n", "1024", "--grace", "1", "sleep", "600"}),
                         clean_environment({{"LOCKSTEP_TEST_FAMILY", mark}}));
    ASSERT_TRUE(eventually([&] { return processes_with("LOCKSTEP_TEST_FAMILY=" + mark).size() > 2; }));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 50));  // not a wait: another moment each time
    launcher.signal(SIGINT);
    EXPECT_EQ(launcher.wait(40s), 6) << launcher.output();
    EXPECT_TRUE(processes_with("LOCKSTEP_TEST_FAMILY=" + mark).empty());
  }
}

TEST(RunSignals, CtrlZHoldsTheJobAndFgGoesOn) {
  RankProcess launcher(run_command({"sh", "-c", "echo pid $$; exec " LAUNCHED " told"}), clean_environment());
  const std::string worker = launcher.expect_line("[0] pid ").substr(8);
  launcher.expect_line("[0] started");
  launcher.signal(SIGTSTP);
  EXPECT_TRUE(eventually([&] { return is_stopped(worker) && is_stopped(std::to_string(launcher.pid())); }));
  launcher.signal(SIGCONT);
  EXPECT_TRUE(eventually([&] { return !is_stopped(worker); }));
  launcher.signal(SIGTERM);
  EXPECT_EQ(launcher.wait(), 6);
}

// --- nothing stays behind

/// A job with grandchildren of every kind, marked so that all its processes can be found.
class Family {
 public:
  explicit Family(int number)
      : mark_("LOCKSTEP_TEST_FAMILY=" + std::to_string(::getpid()) + "." + std::to_string(number)),
        launcher_(run_command({"-n", "3", "--grace", "0.2", LAUNCHED, "family"}),
                  clean_environment({{"LOCKSTEP_TEST_FAMILY", mark_.substr(mark_.find('=') + 1)},
                                     {"TMPDIR", folder_.path().string()}})) {
    for (int i = 0; i < 3; ++i) {
      const auto line = launcher_.expect_line("[");  // [RANK] started as PID
      worker_ = std::stoi(line.substr(line.rfind(' ') + 1));
    }
  }

  std::vector<int> processes() const { return processes_with(mark_); }
  RankProcess& launcher() { return launcher_; }
  const std::filesystem::path& folder() const { return folder_.path(); }

  int supervisor() const { return child_of(launcher_.pid()); }
  int worker() const { return worker_; }

 private:
  int child_of(int parent) const {
    for (int pid : processes()) {
      std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
      std::string line{std::istreambuf_iterator<char>(file), {}};
      if (std::atoi(line.substr(line.rfind(')') + 4).c_str()) == parent) return pid;
    }
    return -1;
  }

  TemporaryFolder folder_;
  const std::string mark_;
  RankProcess launcher_;
  int worker_ = 0;  // pid of one of them; the supervisor has other children, too
};

/// All are gone within a second; says how long it took.
void expect_all_gone(Family& family, const char* killed) {
  const auto begin = Clock::now();
  EXPECT_TRUE(eventually([&] { return family.processes().empty(); }, 1s))
      << family.processes().size() << " processes are left a second after " << killed << " was killed";
  EXPECT_TRUE(std::filesystem::is_empty(family.folder())) << "the secret stayed after " << killed << " was killed";
  const auto took = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  static double longest = 0;
  if (took > longest) std::cout << "gone " << (longest = took) << " ms after " << killed << " was killed\n";
}

TEST(RunOrphans, NothingOutlivesALauncherThatIsKilled) {
  Family family(-1);
  EXPECT_TRUE(eventually([&] { return family.processes().size() == 2 + 3 * 5; })) << family.processes().size();
  family.launcher().signal(SIGKILL);
  expect_all_gone(family, "the launcher");
}

TEST(RunOrphans, NothingOutlivesASupervisorThatIsKilled) {
  Family family(-2);
  ASSERT_TRUE(send_signal(family.supervisor(), SIGKILL));
  expect_all_gone(family, "the supervisor");
  EXPECT_EQ(family.launcher().wait(), 70);
  EXPECT_THAT(family.launcher().output(), HasSubstr("the supervisor of the workers"));
}

TEST(RunOrphans, CtrlCEndsAJobWhoseSupervisorIsStopped) {
  for (int times : {1, 2}) {
    Family family(-2 - times);
    const int supervisor = family.supervisor();
    ASSERT_TRUE(send_signal(supervisor, SIGSTOP));
    ASSERT_TRUE(eventually([&] { return is_stopped(std::to_string(supervisor)); }));
    for (int i = 0; i < times; ++i) family.launcher().signal(SIGINT);
    EXPECT_EQ(family.launcher().wait(40s), 6) << family.launcher().output();
    expect_all_gone(family, "a stopped supervisor's job");
  }
}

TEST(RunOrphans, NothingIsLeftWhenWorkersEndWell) {
  const std::string mark = "ends well " + std::to_string(::getpid());
  RankProcess launcher(run_command({"-n", "2", "sh", "-c", "sleep 60 & setsid sleep 60 & exit 0"}),
                       clean_environment({{"LOCKSTEP_TEST_FAMILY", mark}}));
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_TRUE(processes_with("LOCKSTEP_TEST_FAMILY=" + mark).empty());
}

TEST(RunOrphans, NothingIsLeftAfterRandomKills) {
  const char* count = std::getenv("LOCKSTEP_TEST_RANDOM_KILLS");
  std::mt19937 random(4711);
  for (int turn = 0, turns = count ? std::atoi(count) : 20; turn < turns && !HasFailure(); ++turn) {
    SCOPED_TRACE("kill " + std::to_string(turn));
    Family family(turn);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));  // not a wait: another moment each time
    const char* names[] = {"the launcher", "the supervisor", "a worker"};
    const int which = static_cast<int>(random() % 3);
    const int victims[] = {family.launcher().pid(), family.supervisor(), family.worker()};
    ASSERT_TRUE(send_signal(victims[which], SIGKILL));
    expect_all_gone(family, names[which]);
    EXPECT_EQ(family.launcher().wait(), which == 0 ? 128 + SIGKILL : which == 1 ? 70 : 4);
  }
}

TEST(RunOrphans, NothingIsLeftOfALauncherThatIsKilledWhileItStarts) {
  std::mt19937 random(42);
  for (int turn = 0; turn < 20; ++turn) {
    TemporaryFolder folder;
    const std::string mark = "starts " + std::to_string(::getpid()) + "." + std::to_string(turn);
    RankProcess launcher(run_command({"-n", "3", LAUNCHED, "family"}),
                         clean_environment({{"LOCKSTEP_TEST_FAMILY", mark}, {"TMPDIR", folder.path().string()}}));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));  // another moment each time
    launcher.signal(SIGKILL);
    EXPECT_TRUE(eventually([&] { return processes_with("LOCKSTEP_TEST_FAMILY=" + mark).empty(); }, 1s)) << turn;
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << turn;
  }
}

}  // namespace
}  // namespace lockstep
