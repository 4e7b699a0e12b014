#include "doctor/checks.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "support/temporary_folder.h"
#include "tools/doctor_facts.h"

namespace lockstep::tool {
namespace {

TEST(Doctor, JudgesTheCores) {
  auto some = machine();
  expect_ok(check_cores(some, 8), "8 cores");
  expect_warning(check_cores(some, 9), "8 cores, for 9 ranks", "at most 8 ranks");
  some.allowed_cores = 4;
  expect_ok(check_cores(some, 4), "4 of 8 cores");
  some.cgroup.cores = 1.5;
  expect_ok(check_cores(some, 1), "limited to 1.5 by the cgroup");
  expect_warning(check_cores(some, 2), "for 2 ranks", "at most 1 rank ");
}

TEST(Doctor, JudgesTheThreads) {
  auto some = machine();
  expect_ok(check_threads(some, 1, std::nullopt), "lockstep run sets it");
  expect_ok(check_threads(some, 4, "2"), "OMP_NUM_THREADS is 2");
  expect_ok(check_threads(some, 4, "2,1"), "OMP_NUM_THREADS is 2");
  expect_warning(check_threads(some, 4, std::nullopt), "4 ranks with 8 threads each share 8 cores",
                 "OMP_NUM_THREADS=2");
  expect_warning(check_threads(some, 4, "4"), "share 8 cores", "OMP_NUM_THREADS=2");
  for (const auto* senseless : {"", "0", "four", "-1"})
    expect_warning(check_threads(some, 16, senseless), "OpenMP ignores it", "OMP_NUM_THREADS=1");
  some.cgroup.cores = 2;
  expect_warning(check_threads(some, 1, std::nullopt), "1 rank with 8 threads each share 2 cores", "OMP_NUM_THREADS=2");
}

TEST(Doctor, JudgesTheMemory) {
  auto some = machine();
  expect_ok(check_memory(some, 4), "30 GiB of 32 GiB free");
  some.cgroup.memory_bytes = 4 * kGibibyte;
  some.cgroup.memory_used_bytes = 1 * kGibibyte;
  expect_ok(check_memory(some, 3), "3 GiB of 4 GiB free, the cgroup's limit");
  expect_warning(check_memory(some, 4), "for 4 ranks", "docker run --memory");
  expect_error(check_memory(some, 13), "for 13 ranks", "fewer ranks");
  some.cgroup.memory_used_bytes = 5 * kGibibyte;
  expect_error(check_memory(some, 1), "0 bytes of 4 GiB", "fewer ranks");
}

TEST(Doctor, JudgesTheNumaNodes) {
  auto some = machine();
  expect_ok(check_numa(some, 4), "1 node");
  some.numa_nodes = some.allowed_numa_nodes = 2;
  expect(check_numa(some, 1), Status::kOk, "2 nodes", "--bind");
  expect_warning(check_numa(some, 2), "may run on 2 of them", "lockstep run --bind");
  some.allowed_numa_nodes = 1;
  expect_ok(check_numa(some, 2), "2 nodes");
}

TEST(Doctor, JudgesTheSharedMemory) {
  auto some = machine();
  expect_ok(check_shared_memory(some, true), "16 GiB of 16 GiB");
  some.shared_memory = Space{64 * kMebibyte, 64 * kMebibyte};
  expect_warning(check_shared_memory(some, true), "64 MiB of 64 MiB free, Docker's default", "--shm-size=1g");
  expect_ok(check_shared_memory(some, false), "64 MiB of 64 MiB free");
  some.shared_memory = Space{kGibibyte, kMebibyte};
  expect_warning(check_shared_memory(some, true), "1 MiB of 1 GiB", "remove files that dead programs left");
  expect_warning(check_shared_memory(some, true), "too small for NCCL", "or set NCCL_SHM_DISABLE=1");
  some.shared_memory.reset();
  expect_warning(check_shared_memory(some, false), "/dev/shm is missing", "--ipc=host");
}

TEST(Doctor, JudgesTheLimits) {
  auto some = machine();
  expect_ok(check_open_files(some, 8), "1024");
  expect_error(check_open_files(some, 256), "256 ranks need about 1280", "ulimit -n 4096");
  some.open_files = {512, 512};
  expect_warning(check_open_files(some, 2), "512, below the usual 1024", "--ulimit nofile=4096");
  some.open_files = {};
  expect_ok(check_open_files(some, 1000), "unlimited");

  expect_ok(check_processes(some, 8), "unlimited");
  some.processes = {300, 9000};
  expect_ok(check_processes(some, 2), "300");
  expect_warning(check_processes(some, 3), "3 ranks need about 160", "ulimit -u 4096");
  expect_error(check_processes(some, 8), "8 ranks need about 320, threads included", "ulimit -u 4096");
  some.is_root = true;
  expect_ok(check_processes(some, 8), "unlimited");
  some.cgroup.processes = 100;
  expect_error(check_processes(some, 8), "100, the cgroup's limit", "--pids-limit 4096");

  expect_ok(check_locked_memory(some), "unlimited");
  some.locked_memory = {8 * kMebibyte, 8 * kMebibyte};
  expect_ok(check_locked_memory(some), "8 MiB, sufficient without InfiniBand");
  some.has_infiniband = true;
  expect_warning(check_locked_memory(some), "InfiniBand locks", "memlock unlimited");
}

TEST(Doctor, JudgesTheClock) {
  auto some = machine();
  expect_ok(check_clock(some, true), "synchronized by NTP");
  some.clock.is_synchronized = false;
  expect_ok(check_clock(some, false), "matters only between hosts");
  expect_warning(check_clock(some, true), "not synchronized by NTP", "timedatectl set-ntp true");
  some.clock.year = 2023;
  expect_error(check_clock(some, false), "the clock says 2023", "chrony");
}

TEST(Machine, IsReadFromTheKernel) {
  const auto here = read_machine();
  EXPECT_GE(here.cores, 1);
  EXPECT_GE(here.allowed_cores, 1);
  EXPECT_LE(here.allowed_numa_nodes, here.numa_nodes);
  EXPECT_GT(here.memory_bytes, here.available_memory_bytes);
  EXPECT_GT(here.available_memory_bytes, 0U);
  EXPECT_NE(here.kernel, "");
  EXPECT_NE(here.cpu_model, "");
  EXPECT_GE(here.clock.year, 2024);
}

TEST(Machine, SaysBytesInWords) {
  EXPECT_EQ(format_bytes(0), "0 bytes");
  EXPECT_EQ(format_bytes(64 * kMebibyte), "64 MiB");
  EXPECT_EQ(format_bytes(23 * kGibibyte + kGibibyte / 2), "23.5 GiB");
  EXPECT_EQ(format_bytes(uint64_t{5} << 40), "5 TiB");
}

/// A root of made-up files.
class FakeRoot {
 public:
  FakeRoot& with(const std::string& path, const std::string& text) {
    const auto full = folder_.path() / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text << '\n';
    return *this;
  }
  const std::filesystem::path& path() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
};

TEST(Cgroup, ReadsTheSmallestLimitOfAllGroupsAboveInVersionTwo) {
  FakeRoot root;
  root.with("proc/self/cgroup", "0::/batch/job")
      .with("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw")
      .with("sys/fs/cgroup/batch/job/cpu.max", "max 100000")
      .with("sys/fs/cgroup/batch/job/memory.max", "max")
      .with("sys/fs/cgroup/batch/job/pids.max", "max")
      .with("sys/fs/cgroup/batch/cpu.max", "150000 100000")
      .with("sys/fs/cgroup/batch/memory.max", "1000")
      .with("sys/fs/cgroup/batch/memory.current", "700")
      .with("sys/fs/cgroup/batch/memory.stat", "anon 300\ninactive_file 200")
      .with("sys/fs/cgroup/batch/pids.max", "99")
      .with("sys/fs/cgroup/cpu.max", "800000 100000")
      .with("sys/fs/cgroup/memory.max", "2000")
      .with("sys/fs/cgroup/pids.max", "200");
  EXPECT_EQ(read_cgroup_limits(root.path()), (CgroupLimits{1.5, 1000, 500, 99}));
}

TEST(Cgroup, ReadsVersionOneAndAContainersOwnMount) {
  FakeRoot root;
  root.with("proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n3:pids:/docker/abc\n0::/")
      .with("proc/self/mountinfo",
            "31 23 0:27 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            "32 23 0:28 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "33 23 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids")
      .with("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000")
      .with("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
      .with("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000")
      .with("sys/fs/cgroup/memory/memory.usage_in_bytes", "1500")
      .with("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 100")
      .with("sys/fs/cgroup/pids/docker/abc/pids.max", "77");
  EXPECT_EQ(read_cgroup_limits(root.path()), (CgroupLimits{2.5, 2000, 1400, 77}));
}

TEST(Cgroup, KnowsNoLimitWhereThereIsNone) {
  FakeRoot root;
  EXPECT_EQ(read_cgroup_limits(root.path()), CgroupLimits{});
  root.with("proc/self/cgroup", "5:cpu:/\n4:memory:/")
      .with("proc/self/mountinfo",
            "31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory")
      .with("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
      .with("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
      .with("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(read_cgroup_limits(root.path()), CgroupLimits{});
}

}  // namespace
}  // namespace lockstep::tool
