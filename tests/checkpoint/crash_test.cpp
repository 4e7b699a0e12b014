// What happens to checkpoints when processes and disks do not do their part.

#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_directory.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/folder.h"
#include "support/messages.h"
#include "support/rank_process.h"
#include "support/slowness.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// Records the folders that this process syncs, and lets some of these calls fail. Between the C library and its users.
class FolderSyncs {
 public:
  FolderSyncs() { set_current(this); }
  ~FolderSyncs() { set_current(nullptr); }

  /// Lets all calls fail after `count` more of them. None: lets no call fail.
  void fail_after(std::optional<size_t> count) {
    const std::lock_guard lock(mutex());
    left_ = count;
  }
  /// Returns the folders that were synced since the last call.
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex());
    return std::exchange(folders_, {});
  }

  /// Returns 0, or the reason why syncing this file is to fail.
  static int on_sync(int file) {
    struct stat status {};
    if (::fstat(file, &status) != 0 || !S_ISDIR(status.st_mode)) return 0;
    const std::lock_guard lock(mutex());
    auto* current = current_;
    if (!current) return 0;
    if (current->left_ && *current->left_ == 0) return EIO;
    if (current->left_) --*current->left_;
    current->folders_.push_back(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(file)).string());
    return 0;
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static void set_current(FolderSyncs* syncs) {
    const std::lock_guard lock(mutex());
    current_ = syncs;
  }

  // Guarded by mutex().
  static inline FolderSyncs* current_ = nullptr;
  std::optional<size_t> left_;
  std::vector<std::string> folders_;
};

int64_t number_in(const std::string& line) {
  return std::stoll(line.substr(line.rfind(' ') + 1));
}

TEST(Crash, ACompleteCheckpointExistsAtAnyMomentOfAKill) {
  const TemporaryFolder temporary;
  const auto folder = temporary.path().string();
  const int kills = is_long_tier() ? 200 : 8;
  std::mt19937 random(5);
  int unfinished = 0;
  for (int i = 0; i < kills; ++i) {
    int64_t saved = -1;
    {
      RankProcess process({TEST_RANKS, "resuming_rank", "save", folder}, {});
      saved = number_in(process.expect_line("saved "));
      // The moment of the kill is the subject of the test: anywhere in the next saves.
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
      process.signal(SIGKILL);
      EXPECT_EQ(process.wait(), 128 + SIGKILL) << process.output();
    }
    unfinished += !detail::read_folder(folder, "step").unfinished.empty();
    run_threads(1, [&](ProcessGroup world) {
      auto tensor = torch::zeros({100000});
      int64_t count = -1;
      auto state = TrainingState{}.add("tensor", tensor).add("count", count);
      CheckpointDirectory checkpoints(world, folder, {.keep_last = 2});
      EXPECT_TRUE(detail::read_folder(folder, "step").unfinished.empty());
      for (int64_t number : checkpoints.numbers())
        EXPECT_TRUE(verify_checkpoint(checkpoints.path(number)).damage.empty()) << number;
      EXPECT_GE(checkpoints.resume(state), saved + 1);
      EXPECT_GE(count, saved);
      EXPECT_TRUE(torch::equal(tensor, torch::full({100000}, static_cast<float>(count))));
    });
  }
  EXPECT_GT(unfinished, 0) << "no kill hit a save: the test proves nothing";
}

/// A tmpfs of this size, for this thread and its threads only.
class SmallDisk {
 public:
  explicit SmallDisk(const std::string& options) {
    is_mounted_ = ::unshare(CLONE_NEWNS) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                  ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~SmallDisk() {
    if (is_mounted_) ::umount(folder_.path().c_str());
  }
  bool is_mounted() const { return is_mounted_; }
  bool make_read_only() const {
    return ::mount("tmpfs", folder_.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr) == 0;
  }
  std::string path() const { return folder_.path().string(); }

 private:
  TemporaryFolder folder_;
  bool is_mounted_ = false;
};

TEST(Crash, AFullDiskLosesNothing) {
  const SmallDisk disk("size=1m");
  if (!disk.is_mounted()) GTEST_SKIP() << "this user cannot mount a tmpfs";
  for (const bool asynchronous : {false, true}) {
    SCOPED_TRACE(asynchronous);
    const auto folder = disk.path() + "/" + std::to_string(asynchronous);
    run_threads(2, [&](ProcessGroup world) {
      auto small = torch::ones({10000}), large = torch::ones({1000000});
      CheckpointDirectory checkpoints(world, folder, {.asynchronous = asynchronous});
      EXPECT_TRUE(checkpoints.save(0, TrainingState{}.add("x", small)) && checkpoints.wait());
      EXPECT_FALSE(checkpoints.save(1, TrainingState{}.add("x", large)) && checkpoints.wait());
      world.barrier();
      EXPECT_EQ(checkpoints.numbers(), std::vector<int64_t>{0});
      EXPECT_TRUE(detail::read_folder(folder, "step").unfinished.empty());
      small.zero_();
      EXPECT_EQ(checkpoints.resume(TrainingState{}.add("x", small)), 1);
      EXPECT_TRUE(torch::equal(small, torch::ones({10000})));
      EXPECT_TRUE(checkpoints.save(2, TrainingState{}.add("x", small)) && checkpoints.wait());
    });
    run_threads(1, [&](ProcessGroup world) {
      auto large = torch::ones({1000000});
      CheckpointDirectory checkpoints(world, folder, {.on_error = OnSaveError::kThrow});
      expect_error<CheckpointError>([&] { checkpoints.save(3, TrainingState{}.add("x", large)); }, "step-00000003.pt",
                                    "No space left on device", "free space");
    });
  }
}

TEST(Crash, AReadOnlyFolderLosesNothing) {
  const SmallDisk disk("size=8m");
  if (!disk.is_mounted()) GTEST_SKIP() << "this user cannot mount a tmpfs";
  run_threads(1, [&](ProcessGroup world) {
    auto x = torch::ones({10});
    auto state = TrainingState{}.add("x", x);
    std::optional<CheckpointDirectory> checkpoints;
    checkpoints.emplace(world, disk.path() + "/a");
    EXPECT_TRUE(checkpoints->save(0, state));
    checkpoints.reset();
    ASSERT_TRUE(disk.make_read_only());
    expect_error<SystemError>([&] { CheckpointDirectory(world, disk.path() + "/a"); }, "Read-only file system",
                              "a folder that this user can write to");
    EXPECT_EQ(load_checkpoint(disk.path() + "/a/step-00000000.pt").at("x"), Value(x));
  });
}

// --- power failures

TEST(Crash, NewFoldersAreSyncedInTheFoldersThatTheyAreIn) {
  const TemporaryFolder temporary;
  const auto base = std::filesystem::canonical(temporary.path()).string();
  FolderSyncs syncs;
  run_threads(1, [&](ProcessGroup world) { CheckpointDirectory(world, base + "/runs/a"); });
  EXPECT_THAT(syncs.take(), testing::ElementsAre(base, base + "/runs"));
  run_threads(1, [&](ProcessGroup world) { CheckpointDirectory(world, base + "/runs/a"); });
  EXPECT_THAT(syncs.take(), testing::IsEmpty());
  syncs.fail_after(0);
  run_threads(1, [&](ProcessGroup world) {
    expect_error<SystemError>([&] { CheckpointDirectory(world, base + "/runs/b"); }, "fsync",
                              base + "/runs:", "Input/output error");
  });
}

TEST(Crash, AFolderThatCannotBeSyncedKeepsOlderCheckpoints) {
  for (const bool asynchronous : {false, true}) {
    SCOPED_TRACE(asynchronous);
    const TemporaryFolder temporary;
    const auto folder = temporary.path().string();
    FolderSyncs syncs;
    run_threads(1, [&](ProcessGroup world) {
      int64_t x = 0;
      const auto state = TrainingState{}.add("x", x);
      CheckpointDirectory checkpoints(world, folder, {.keep_last = 1, .best = "x", .asynchronous = asynchronous});
      const auto save = [&](int64_t number) {
        x = number;
        return checkpoints.save(number, state, {{"x", static_cast<double>(number)}}) && checkpoints.wait();
      };
      EXPECT_TRUE(save(0));
      syncs.fail_after(0);
      EXPECT_FALSE(save(1));
      EXPECT_THAT(checkpoints.last_error(), AllOf(HasSubstr("step-00000001.pt may not be on disk: fsync"),
                                                  HasSubstr("Input/output error"), HasSubstr("older ones are kept")));
      EXPECT_EQ(checkpoints.numbers(), (std::vector<int64_t>{0, 1}));
      EXPECT_EQ(load_checkpoint(folder + "/best.pt").at("x"), Value(0));
      syncs.fail_after(1);  // the checkpoint is on disk, but the link to the best one may not be
      EXPECT_TRUE(save(2));
      EXPECT_EQ(checkpoints.numbers(), (std::vector<int64_t>{0, 1, 2}));
      syncs.fail_after(std::nullopt);
      EXPECT_TRUE(save(3));
      EXPECT_EQ(checkpoints.last_error(), "");
      EXPECT_EQ(checkpoints.numbers(), std::vector<int64_t>{3});
    });
  }
}

TEST(Crash, AFolderThatCannotBeSyncedKeepsShards) {
  const TemporaryFolder temporary;
  const auto folder = temporary.path().string();
  FolderSyncs syncs;
  run_threads(2, [&](ProcessGroup world) {
    auto weight = torch::ones({8}, torch::requires_grad());
    ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer({weight}, world, torch::optim::AdamWOptions(0.01));
    const auto train = [&] {
      weight.mutable_grad() = torch::ones({8});
      optimizer.step();
    };
    train();
    const auto state = TrainingState{}.add("weight", weight).add("optimizer", optimizer);
    CheckpointDirectory checkpoints(world, folder, {.keep_last = 1, .sharded = true});
    const auto set_failure = [&](std::optional<size_t> count) {
      world.barrier();
      if (world.rank() == 0) syncs.fail_after(count);
      world.barrier();
    };
    EXPECT_TRUE(checkpoints.save(0, state));
    set_failure(0);  // a shard may not be on disk: the checkpoint does not appear
    EXPECT_FALSE(checkpoints.save(1, state));
    EXPECT_THAT(checkpoints.last_error(), AllOf(HasSubstr("was not saved"), HasSubstr("Input/output error")));
    EXPECT_EQ(checkpoints.numbers(), std::vector<int64_t>{0});
    set_failure(2);  // the shards are on disk, but the file that lists them may not be
    EXPECT_FALSE(checkpoints.save(2, state));
    EXPECT_THAT(checkpoints.last_error(), HasSubstr("may not be on disk"));
    EXPECT_EQ(checkpoints.numbers(), (std::vector<int64_t>{0, 2}));
    EXPECT_EQ(checkpoints.resume(state), 3);
    EXPECT_EQ(checkpoints.load(0, state), 1);
    set_failure(std::nullopt);
    EXPECT_TRUE(checkpoints.save(3, state));
    EXPECT_EQ(checkpoints.numbers(), std::vector<int64_t>{3});
    EXPECT_EQ(detail::read_folder(folder, "step").shards.size(), 2u);
  });
}

// --- preemption

/// `lockstep run` of two ranks that train for so many steps.
std::vector<std::string> train_command(const std::string& folder, const std::string& steps) {
  return {LOCKSTEP_TOOL,   "run",   "-n",   "2",  "--max-restarts", "2", "--restart-delay", "0.1", TEST_RANKS,
          "resuming_rank", "train", folder, steps};
}

int64_t sum_below(int64_t steps) {
  return steps * (steps - 1) / 2;
}

/// Returns the pid of a worker whose environment has this rank.
int pid_of_rank(int launcher, int rank) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream environment(entry.path() / "environ"), command(entry.path() / "cmdline");
    const std::string variables{std::istreambuf_iterator<char>(environment), {}};
    const std::string words{std::istreambuf_iterator<char>(command), {}};
    if (words.starts_with(TEST_RANKS) &&
        (std::string(1, '\0') + variables).find(std::string(1, '\0') + "RANK=" + std::to_string(rank) + '\0') !=
            std::string::npos &&
        variables.find("LOCKSTEP_TEST_JOB=" + std::to_string(launcher)) != std::string::npos)
      return std::stoi(name);
  }
  return -1;
}

TEST(Preemption, OfOneWorkerRestartsAllWhereTheyStopped) {
  const TemporaryFolder temporary;
  const int job = ::getpid();
  RankProcess launcher(train_command(temporary.path().string(), "20000"), {{"LOCKSTEP_TEST_JOB", std::to_string(job)}});
  launcher.expect_line("[0] step 10");
  const int pid = pid_of_rank(job, 1);
  ASSERT_GT(pid, 0);
  ::kill(pid, SIGTERM);
  const auto stopped = number_in(launcher.expect_line("[0] stopped after "));
  launcher.expect_line("lockstep run: rank ");
  EXPECT_EQ(number_in(launcher.expect_line("[0] resumed at ")), stopped + 1);
  launcher.expect_line("[0] sum " + std::to_string(sum_below(20000)), 60s);
  EXPECT_EQ(launcher.wait(60s), 0) << launcher.output();
  EXPECT_THAT(launcher.output(),
              AllOf(HasSubstr("was preempted (exit code 6); restart 1 of 2"),
                    HasSubstr("[1] stopped after " + std::to_string(stopped)), Not(HasSubstr("to blame"))));
}

TEST(Preemption, OfTheLauncherResumesAtTheNextStart) {
  for (int signal : {SIGTERM, SIGUSR1, SIGINT}) {
    SCOPED_TRACE(signal);
    const TemporaryFolder temporary;
    int64_t stopped = 0;
    {
      RankProcess launcher(train_command(temporary.path().string(), "1000000"), {});
      launcher.expect_line("[0] step 10");
      launcher.signal(signal);
      stopped = number_in(launcher.expect_line("[0] stopped after "));
      EXPECT_EQ(launcher.wait(), 6) << launcher.output();
      EXPECT_THAT(launcher.output(), Not(HasSubstr("restart ")));
    }
    const auto steps = stopped + 100;
    RankProcess again(train_command(temporary.path().string(), std::to_string(steps)), {});
    EXPECT_EQ(number_in(again.expect_line("[0] resumed at ")), stopped + 1);
    again.expect_line("[0] sum " + std::to_string(sum_below(steps)));
    EXPECT_EQ(again.wait(), 0) << again.output();
  }
}

}  // namespace
}  // namespace lockstep

/// In place of the C library's: a test is linked before it.
extern "C" __attribute__((visibility("default"))) int fsync(int file) {
  if (const int reason = lockstep::FolderSyncs::on_sync(file)) {
    errno = reason;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, file));
}
