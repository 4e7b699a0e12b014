#include "doctor/gpus.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "doctor/checks.h"
#include "support/temporary_folder.h"
#include "tools/doctor_facts.h"
#include "tools/script.h"

namespace lockstep::tool {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

TEST(Doctor, JudgesTheDriver) {
  auto some = gpus();
  expect_ok(check_driver(some, probe()), "550.54.15");
  some.smi_failure =
      "ended with exit code 15: Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error";
  expect_warning(check_driver(some, probe()), "nvidia-smi ended with exit code 15: Unable to determine",
                 "dmesg | grep NVRM");
  some = {.has_driver = true, .device_files = 2};
  expect(check_driver(some, probe()), Status::kOk, "nvidia-smi is not in PATH",
         "NVIDIA_DRIVER_CAPABILITIES=compute,utility");
  some.device_files = 0;
  expect_ok(check_driver(some, cuda_probe()), "nvidia-smi is not in PATH");
  expect_warning(check_driver(some, probe()), "/dev has no nvidia0", "docker run --gpus all");
  expect_warning(check_driver({}, probe()), "no NVIDIA driver, although this build has nccl", "install the driver");
}

TEST(Doctor, SaysHowManyGpusThereAreAndWhich) {
  auto some = gpus();
  const auto found = [&](const Probe& probe) { return check_gpus(some, probe, 1).found; };
  EXPECT_EQ(found(cuda_probe()), "2 x NVIDIA H200, 140 GiB each");
  EXPECT_EQ(found(probe()), "2 x NVIDIA H200, 140 GiB each");
  some.installed[1].gpu = {"NVIDIA GB10", 0};
  EXPECT_EQ(found(cuda_probe()), "0: NVIDIA H200 (140 GiB), 1: NVIDIA GB10 (memory unknown)");
  some.installed.clear();
  EXPECT_EQ(found(probe()), "2 in /dev");
  EXPECT_EQ(found(cuda_probe()), "2 x NVIDIA H200, 140 GiB each");
}

TEST(Doctor, NamesWhatCudaVisibleDevicesNamesInVain) {
  auto some = gpus();
  auto build = cuda_probe();
  build.gpus.pop_back();
  some.visible_devices = "1";
  EXPECT_EQ(check_gpus(some, build, 1).found, "2 x NVIDIA H200, 140 GiB each; CUDA_VISIBLE_DEVICES is \"1\"");
  for (const auto* fine : {" 1 ", "0,-1", "GPU-8f2a3c11", "MIG-2a3c"}) {
    some.visible_devices = fine;
    expect_ok(check_gpus(some, build, 1), fine);
  }
  some.visible_devices = "0,2,1";
  expect_warning(check_gpus(some, build, 1),
                 "CUDA_VISIBLE_DEVICES is \"0,2,1\": there is no GPU 2, so CUDA sees 1 of them",
                 "unset CUDA_VISIBLE_DEVICES, or list GPUs from 0 to 1");
  build.gpus.clear();
  for (const auto* nothing : {"", "-1", "7", "4294967296", "none"}) {
    some.visible_devices = nothing;
    expect_warning(check_gpus(some, build, 1), "CUDA sees none of them", "list GPUs from 0 to 1");
    EXPECT_THAT(check_gpus(some, build, 1).found, HasSubstr(std::string("is \"") + nothing + "\":"));
    expect_ok(check_gpus(some, probe(), 1), "CUDA_VISIBLE_DEVICES is");  // without nccl it has no say
  }
}

TEST(Doctor, SaysWhenLibTorchSeesFewerGpusThanThereAre) {
  auto some = gpus();
  auto build = cuda_probe();
  build.gpus.pop_back();
  expect_warning(check_gpus(some, build, 1), "a LibTorch for CUDA 12.1 sees 1 of them", "MIG");
  build.gpus.pop_back();
  expect_warning(check_gpus(some, build, 1), "sees none of them", "check that the driver supports CUDA 12.1");
  some.installed.clear();  // no nvidia-smi
  some.visible_devices = "7";
  expect_warning(check_gpus(some, build, 1), "2 in /dev; CUDA_VISIBLE_DEVICES is \"7\"", "CUDA_VISIBLE_DEVICES");
}

TEST(Doctor, SaysWhenThereAreMoreRanksThanGpus) {
  expect_ok(check_gpus(gpus(), cuda_probe(), 2), "2 x NVIDIA H200");
  expect_warning(check_gpus(gpus(), cuda_probe(), 3), "2 for 3 ranks, so the ranks train on the CPU",
                 "at most 2 ranks here");
  auto one = gpus();
  one.installed.pop_back();
  auto build = cuda_probe();
  build.gpus.pop_back();
  expect_warning(check_gpus(one, build, 8), "1 for 8 ranks, so the ranks train on the CPU", "at most 1 ranks here");
  one.on_host = 8;  // each rank is shown its own
  expect_ok(check_gpus(one, build, 8), "1 x NVIDIA H200");
}

TEST(Doctor, JudgesTheComputeModes) {
  auto some = gpus();
  expect_ok(check_compute_modes(some), "any number of processes");
  some.installed[0].compute_mode = "Exclusive_Process";
  expect_warning(check_compute_modes(some), "Exclusive_Process: GPU 0 (00000000:19:00.0)", "nvidia-smi -c DEFAULT");
  some.installed[1].compute_mode = "Prohibited";
  expect_error(check_compute_modes(some), "Prohibited: GPU 1 (00000000:3B:00.0)", "nvidia-smi -c DEFAULT");
  some.visible_devices = "0";
  expect_warning(check_compute_modes(some), "Exclusive_Process", "-c DEFAULT");
}

TEST(Doctor, SaysWhatABuildWithoutNcclIsMissing) {
  EXPECT_EQ(check_nccl(cuda_probe()), (Finding{"NCCL", Status::kOk, "2.18.5, for CUDA 12.1"}));
  auto some = probe();
  expect_warning(check_nccl(some), "whose LibTorch has no CUDA", "install a CUDA build of PyTorch or LibTorch");
  some.has_cuda = true;
  some.cuda_version = "12.1";
  expect_warning(check_nccl(some), "not in this build",
                 "apt-get install libnccl-dev, install the headers of CUDA 12.1");
}

TEST(Doctor, ReadsNcclSocketIfnameAsNcclDoes) {
  const auto network = between_hosts();  // lo, eth0, and eth1 which is down
  for (const auto* fine : {"eth", "eth0", "=eth0", "ib,eth", "eth0:5", "^docker,lo", "^=docker0,lo"})
    expect_ok(check_nccl_interface(fine, network, true), "eth0, selected by NCCL_SOCKET_IFNAME");
  for (const auto* wrong : {"ib0", "eth1", "=eth", "th0", "^eth,lo"})
    expect_error(check_nccl_interface(wrong, network, false), "none of the interfaces of this host: lo, eth0",
                 "unset it");
  expect_ok(check_nccl_interface("lo", network, false), "lo, selected by");
  expect_error(check_nccl_interface("lo", network, true), "NCCL uses lo, which no other host can reach", "unset it");
  expect_error(check_nccl_interface("^docker", network, true), "NCCL uses lo", "NCCL_SOCKET_IFNAME=^docker,lo");
}

TEST(Doctor, ListsTheVariablesOfNcclAndSaysWhichAreSlow) {
  expect_ok(check_nccl_variables({}, 2, true), "none set");
  Variables some{{"NCCL_DEBUG", "INFO"}, {"NCCL_IB_DISABLE", "1"}, {"NCCL_P2P_DISABLE", "1"}};
  expect_warning(check_nccl_variables(some, 2, false),
                 "NCCL_DEBUG=INFO, NCCL_IB_DISABLE=1, NCCL_P2P_DISABLE=1: ", "unset NCCL_P2P_DISABLE,");
  expect_warning(check_nccl_variables(some, 1, true), "slower transport", "unset NCCL_IB_DISABLE,");
  expect_warning(check_nccl_variables(some, 2, true), "slower transport", "unset NCCL_P2P_DISABLE NCCL_IB_DISABLE,");
  expect_ok(check_nccl_variables(some, 1, false), "NCCL_DEBUG=INFO");
  some["NCCL_P2P_DISABLE"] = "0";
  expect_ok(check_nccl_variables(some, 2, false), "NCCL_P2P_DISABLE=0");
  EXPECT_EQ(nccl_variables({{"NCCL_DEBUG", "INFO"}, {"NCCL_MY_TOKEN", "t"}, {"RANK", "0"}}),
            (Variables{{"NCCL_DEBUG", "INFO"}, {"NCCL_MY_TOKEN", "(hidden)"}}));
}

/// What doctor reads where nvidia-smi is the script.
Gpus gpus_by(const std::string& script, std::chrono::milliseconds limit = 10s) {
  TemporaryFolder folder;
  make_script(folder, "nvidia-smi", script);
  return read_gpus(lookup_in({{"PATH", "/nowhere:" + folder.path().string()}}), limit, folder.path());
}

TEST(Gpus, AreThoseThatNvidiaSmiLists) {
  const auto read = gpus_by(
      "[ \"$*\" = '--query-gpu=index,name,pci.bus_id,memory.total,driver_version,compute_mode "
      "--format=csv,noheader' ] || exit 2\n"
      "echo '0, NVIDIA H200, 00000000:19:00.0, 143360 MiB, 550.54.15, Default'\n"
      "echo '1, NVIDIA GB10, 00000000:3B:00.0, [N/A], 550.54.15, Exclusive_Process'");
  EXPECT_EQ(read.smi_failure, "");
  const InstalledGpu second{.index = 1,
                            .gpu = {"NVIDIA GB10", 0},
                            .bus_id = "00000000:3B:00.0",
                            .driver_version = "550.54.15",
                            .compute_mode = "Exclusive_Process"};
  EXPECT_THAT(read.installed, testing::ElementsAre(gpus().installed[0], second));
}

TEST(Gpus, AreNoneWithTheWordsOfAnNvidiaSmiThatFails) {
  EXPECT_EQ(gpus_by("echo 'Failed to initialize NVML: Driver/library version mismatch'\n"
                    "echo 'NVML library version: 550.144'; exit 18")
                .smi_failure,
            "ended with exit code 18: Failed to initialize NVML: Driver/library version mismatch");
  EXPECT_EQ(gpus_by("echo 'No devices were found'").smi_failure, "printed: No devices were found");
  EXPECT_EQ(gpus_by("exit 0").smi_failure, "lists no GPU");
  EXPECT_EQ(gpus_by("sleep 30", 200ms).smi_failure, "did not end within 0.2 s");
  const auto some = gpus_by(
      "echo '0, NVIDIA H200, 00000000:19:00.0, 143360 MiB, 550.54.15, Default'\n"
      "echo 'Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.'; exit 15");
  EXPECT_EQ(some.installed.size(), 1U);
  EXPECT_THAT(some.smi_failure, HasSubstr("code 15: Unable to determine the device handle"));
}

TEST(Gpus, AreLookedForInDevAndProc) {
  TemporaryFolder root;
  const auto read = [&] { return read_gpus(lookup_in({{"PATH", "/nowhere"}}), 1s, root.path()); };
  EXPECT_FALSE(read().has_smi);
  EXPECT_FALSE(gpus_are_relevant(read(), probe()));
  std::filesystem::create_directories(root.path() / "proc/driver/nvidia");
  std::filesystem::create_directories(root.path() / "dev");
  for (const auto* file :
       {"proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidia11", "dev/nvidia", "dev/nvidiactl", "dev/nvidia-uvm"})
    std::ofstream(root.path() / file) << '\n';
  EXPECT_TRUE(read().has_driver);
  EXPECT_EQ(read().device_files, 2);
  EXPECT_EQ(read().on_host, 0);
  std::filesystem::create_directories(root.path() / "proc/driver/nvidia/gpus/0000:41:00.0");
  EXPECT_EQ(read().on_host, 1);
  EXPECT_TRUE(gpus_are_relevant(read(), probe()));
}

}  // namespace
}  // namespace lockstep::tool
