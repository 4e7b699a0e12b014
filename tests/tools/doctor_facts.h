#pragma once

#include <map>
#include <optional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/version.h>

#include "doctor/doctor.h"

// Facts that are made up, of a healthy machine, and what is expected of the findings.

namespace lockstep::tool {

inline constexpr uint64_t kMebibyte = uint64_t{1} << 20;
inline constexpr uint64_t kGibibyte = uint64_t{1} << 30;

inline Environment::Lookup lookup_in(const std::map<std::string, std::string>& variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

inline Rendezvous rendezvous_of(const std::map<std::string, std::string>& variables) {
  return find_rendezvous(lookup_in(variables));
}

/// Two hosts of two ranks each; this is the first.
inline const std::map<std::string, std::string> kTwoHosts{{"RANK", "0"},
                                                          {"WORLD_SIZE", "4"},
                                                          {"LOCAL_RANK", "0"},
                                                          {"LOCAL_WORLD_SIZE", "2"},
                                                          {"MASTER_ADDR", "node1"},
                                                          {"MASTER_PORT", "29500"}};

inline Network network_of(const std::string& name, const std::string& address) {
  Network network;
  network.host = {.name = "node1", .addresses = {address}};
  network.rendezvous = {.name = name, .addresses = {address}};
  network.local = address;
  network.interfaces = {{"lo", true, {"127.0.0.1"}}, {"eth0", true, {"10.0.0.1"}}, {"eth1", false, {"10.9.0.1"}}};
  network.is_rendezvous_host = true;
  return network;
}

inline Network loopback() {
  return network_of("127.0.0.1", "127.0.0.1");
}

inline Network between_hosts() {
  return network_of("node1", "10.0.0.1");
}

inline Machine machine() {
  Machine machine;
  machine.architecture = "x86_64";
  machine.cores = machine.allowed_cores = 8;
  machine.memory_bytes = 32 * kGibibyte;
  machine.available_memory_bytes = 30 * kGibibyte;
  machine.shared_memory = Space{16 * kGibibyte, 16 * kGibibyte};
  machine.open_files = {1024, 1048576};
  machine.clock = {2026, true};
  return machine;
}

inline Probe probe() {
  Probe probe;
  probe.program = "/opt/lockstep-probe";
  probe.lockstep_version = LOCKSTEP_VERSION_STRING;
  probe.torch_version = "2.4.0";
  probe.torch_library = "/opt/venv/lib/python3/site-packages/torch/lib/libtorch_cpu.so";
  probe.has_mkl = true;
  probe.backends = {"gloo", "threads"};
  return probe;
}

/// Of a build for GPUs that sees two.
inline Probe cuda_probe() {
  Probe some = probe();
  some.has_cuda = true;
  some.cuda_version = "12.1";
  some.gpus = {{"NVIDIA H200", 140 * kGibibyte}, {"NVIDIA H200", 140 * kGibibyte}};
  some.nccl_version = "2.18.5";
  some.backends = {"gloo", "mpi", "nccl", "shm", "threads"};
  return some;
}

/// The two, as nvidia-smi lists them.
inline Gpus gpus() {
  Gpus gpus;
  gpus.has_driver = gpus.has_smi = true;
  gpus.device_files = 2;
  for (int index = 0; index < 2; ++index)
    gpus.installed.push_back({.index = index,
                              .gpu = {"NVIDIA H200", 140 * kGibibyte},
                              .bus_id = index == 0 ? "00000000:19:00.0" : "00000000:3B:00.0",
                              .driver_version = "550.54.15",
                              .compute_mode = "Default"});
  return gpus;
}

inline void expect(const Finding& finding, Status status, const std::string& found, const std::string& remedy) {
  EXPECT_EQ(name_of(finding.status), std::string(name_of(status))) << finding.found;
  EXPECT_THAT(finding.found, testing::HasSubstr(found));
  EXPECT_THAT(finding.remedy, testing::HasSubstr(remedy));
  EXPECT_EQ(finding.remedy.empty() && status != Status::kOk, false) << finding.found;
}

inline void expect_ok(const Finding& finding, const std::string& found) {
  expect(finding, Status::kOk, found, "");
}

inline void expect_warning(const Finding& finding, const std::string& found, const std::string& remedy) {
  expect(finding, Status::kWarning, found, remedy);
}

inline void expect_error(const Finding& finding, const std::string& found, const std::string& remedy) {
  expect(finding, Status::kError, found, remedy);
}

}  // namespace lockstep::tool
