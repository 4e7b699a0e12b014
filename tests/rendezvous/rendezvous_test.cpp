#include "rendezvous/rendezvous.h"

#include <string>
#include <vector>

#include <lockstep/error.h>

#include "support/messages.h"
#include "support/variables.h"

namespace lockstep {
namespace {

/// Where a process with these variables meets the others.
RendezvousPlace place(const Variables& variables, const std::string& init_method = "env://") {
  const auto lookup = lookup_in(variables);
  return find_rendezvous(init_method, Environment::detect(lookup), lookup);
}

int port(const Variables& variables) {
  return std::get<RendezvousPort>(place(variables)).endpoint.port;
}
std::string host(const Variables& variables) {
  return std::get<RendezvousPort>(place(variables)).endpoint.host;
}
std::string name(const Variables& variables) {
  return job_name(lookup_in(variables));
}

RendezvousPlace at_port(const std::string& host, int port) {
  return RendezvousPort{{host, port}, true};
}

const Variables kByHand{{"RANK", "1"}, {"WORLD_SIZE", "4"}};
const Variables kMaster{{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "4711"}};
const Variables kTorchrun{{"RANK", "5"},
                          {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "10.0.0.1"},
                          {"MASTER_PORT", "29500"},
                          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                          {"TORCHELASTIC_RUN_ID", "job-7"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kSrun{{"SLURM_JOB_ID", "77"},
                      {"SLURM_STEP_ID", "0"},
                      {"SLURM_PROCID", "3"},
                      {"SLURM_STEP_NUM_TASKS", "7"},
                      {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                      {"SLURM_NODEID", "1"},
                      {"SLURM_LOCALID", "1"},
                      {"SLURM_STEP_NODELIST", "node[01-03,07]"}};

TEST(RendezvousPlace, IsWhatTheProgramSays) {
  EXPECT_EQ(place({}, "file:///tmp/a b"), RendezvousPlace(RendezvousFile{"/tmp/a b"}));
  EXPECT_EQ(place({}, "tcp://node1:29500"), at_port("node1", 29500));
  EXPECT_EQ(place({}, "tcp://[2001:db8::1]:1"), at_port("2001:db8::1", 1));
  const auto elsewhere =
      with(with(kTorchrun, kMaster), {{"LOCKSTEP_INIT_METHOD", "file:///elsewhere"}, {"LOCKSTEP_STORE_HOSTED", "1"}});
  EXPECT_EQ(place(elsewhere, "tcp://node1:65535"), at_port("node1", 65535));
}

TEST(RendezvousPlace, IsWhatTheVariableSaysForEnv) {
  EXPECT_EQ(place(with(kTorchrun, {{"LOCKSTEP_INIT_METHOD", "file:///shared/x"}})),
            RendezvousPlace(RendezvousFile{"/shared/x"}));
  EXPECT_EQ(place({{"LOCKSTEP_INIT_METHOD", "tcp://node2:80"}}), at_port("node2", 80));
}

TEST(RendezvousPlace, RefusesOtherMethods) {
  for (const std::string method : {"", "env", "env://x", "node1:29500", "file", "file://", "file:///",
                                   "file://relative", "http://node1:80", "TCP://node1:80", " env://"})
    expect_error<UsageError>([&] { place({}, method); }, "init_method is \"" + method + "\"", "file:///path",
                             "tcp://host:port", "env://");
  for (const std::string method : {"", "env://", "file://relative"})
    expect_error<UsageError>(
        [&] {
          place({{"LOCKSTEP_INIT_METHOD", method}});
        },
        "LOCKSTEP_INIT_METHOD is \"" + method + "\"", "file:///path or tcp://host:port");
}

TEST(RendezvousPlace, NeedsAHostAndAPortForTcp) {
  for (const std::string rest :
       {"", "node1", "node1:", ":29500", "node1:0", "node1:65536", "::1:29500", "node1:80/x", "node1:80?rank=0"})
    expect_error<UsageError>([&] { place({}, "tcp://" + rest); }, "init_method is \"tcp://" + rest + "\"",
                             "tcp://host:port", "1 to 65535");
  expect_error<UsageError>(
      [] {
        place({{"LOCKSTEP_INIT_METHOD", "tcp://node1"}});
      },
      "LOCKSTEP_INIT_METHOD is \"tcp://node1\"", "tcp://host:port");
}

TEST(RendezvousPlace, IsAtMasterAddressAndPort) {
  for (const auto& launcher : {kByHand, kOpenMpi, kSrun})
    EXPECT_EQ(place(with(launcher, kMaster)), at_port("node1", 4711));
  EXPECT_EQ(host(with(kByHand, {{"MASTER_ADDR", "fe80::7"}})), "fe80::7");
  EXPECT_EQ(host(with(kByHand, {{"MASTER_ADDR", "[fe80::7]"}})), "fe80::7");
}

TEST(RendezvousPlace, RefusesAMasterAddressThatIsNone) {
  for (const std::string address : {"node1:29500", "10.0.0.1:29500", "tcp://node1", "node 1", "[::1", "[node1]"})
    expect_error<UsageError>(
        [&] {
          place(with(kByHand, {{"MASTER_ADDR", address}}));
        },
        "MASTER_ADDR is \"" + address + "\"", "without a port");
}

TEST(RendezvousPlace, IsHostedByTheLauncherThatSaysSo) {
  EXPECT_EQ(place(with(with(kByHand, kMaster), {{"LOCKSTEP_STORE_HOSTED", "1"}})),
            RendezvousPlace(RendezvousPort{{"node1", 4711}, false}));
  EXPECT_EQ(place(with(with(kByHand, kMaster), {{"LOCKSTEP_STORE_HOSTED", "0"}})), at_port("node1", 4711));
  EXPECT_EQ(place(with(kTorchrun, {{"LOCKSTEP_STORE_HOSTED", "1"}})),
            RendezvousPlace(RendezvousPort{{"10.0.0.1", 29500}, false}));
}

TEST(RendezvousPlace, RefusesALauncherThatHostsNowhere) {
  for (const std::string value : {"", "2", "true", "01"})
    expect_error<UsageError>(
        [&] {
          place(with(kMaster, {{"LOCKSTEP_STORE_HOSTED", value}}));
        },
        "LOCKSTEP_STORE_HOSTED is \"" + value + "\"", "1, ", "or 0");
  expect_error<UsageError>(
      [] {
        place({{"MASTER_PORT", "1"}, {"LOCKSTEP_STORE_HOSTED", "1"}});
      },
      "LOCKSTEP_STORE_HOSTED", "MASTER_ADDR is not set");
  expect_error<UsageError>(
      [] {
        place({{"MASTER_ADDR", "a"}, {"LOCKSTEP_STORE_HOSTED", "1"}});
      },
      "LOCKSTEP_STORE_HOSTED", "MASTER_PORT is not set");
}

// Processes of different builds must agree on the numbers, so they are written out: FNV-1a of the name, by Python.
TEST(RendezvousPlace, IsBesideTorchrunsAgent) {
  EXPECT_EQ(place(kTorchrun), at_port("10.0.0.1", 24280));
  EXPECT_EQ(port(with(kTorchrun, {{"RANK", "0"}, {"LOCAL_RANK", "0"}})), 24280);
  EXPECT_NE(port(with(kTorchrun, {{"MASTER_PORT", "29501"}})), 24280);
  EXPECT_NE(port(with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "job-8"}})), 24280);
  EXPECT_EQ(port(with(kTorchrun, {{"LOCKSTEP_JOB_ID", "other"}})), 24280);
  EXPECT_EQ(port(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})), 29500);
}

// For these names the derived port is MASTER_PORT itself.
TEST(RendezvousPlace, IsNeverTorchrunsOwnPort) {
  EXPECT_EQ(port(with(kTorchrun, {{"MASTER_PORT", "23321"}, {"TORCHELASTIC_RUN_ID", "run0"}})), 23322);
  EXPECT_EQ(port(with(kTorchrun, {{"MASTER_PORT", "29999"}, {"TORCHELASTIC_RUN_ID", "run117"}})), 20000);
}

TEST(RendezvousPlace, IsOnLoopbackWhenAllRanksShareTheHost) {
  EXPECT_EQ(place({}), at_port("127.0.0.1", 29500));
  EXPECT_EQ(place(kByHand), at_port("127.0.0.1", 29500));
  EXPECT_EQ(place(with(kByHand, {{"MASTER_PORT", "81"}})), at_port("127.0.0.1", 81));
  EXPECT_EQ(host(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}})), "127.0.0.1");
}

TEST(RendezvousPlace, NeedsAnAddressForSeveralHosts) {
  expect_error<UsageError>([] { place(kOpenMpi); }, "MASTER_ADDR is not set", "of 4 ranks only 2", "set MASTER_ADDR");
}

TEST(RendezvousPlace, IsOnSlurmsFirstHostAtAPortOfTheStep) {
  EXPECT_EQ(place(kSrun), at_port("node01", 24373));
  EXPECT_NE(port(with(kSrun, {{"SLURM_STEP_ID", "1"}})), 24373);
  EXPECT_NE(port(with(kSrun, {{"SLURM_JOB_ID", "78"}})), 24373);
}

TEST(RendezvousPlace, IsAtAPortOfTheJobWithoutMasterPort) {
  for (const std::string variable :
       {"LOCKSTEP_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})
    EXPECT_EQ(port(with(kByHand, {{variable, "job-7"}})), 20028) << variable;
  EXPECT_EQ(port(with(kByHand, {{"TORCHELASTIC_RUN_ID", "job-7"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}})), 20028);
}

TEST(RendezvousPlace, HasDerivedPortsBelowThoseThatTheSystemChooses) {
  for (int job = 0; job < 5000; ++job) {
    const int derived = port(with(kByHand, {{"LOCKSTEP_JOB_ID", std::to_string(job)}}));
    ASSERT_GE(derived, 20000) << job;
    ASSERT_LE(derived, 29999) << job;
  }
}

TEST(JobName, IsTheFirstThatIsGiven) {
  EXPECT_EQ(name({}), "");
  Variables given{{"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "2"}};
  EXPECT_EQ(name(given), "77.2");
  for (const std::string variable :
       {"OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "LOCKSTEP_JOB_ID"}) {
    EXPECT_EQ(name(with(given, {{variable, ""}})), name(given)) << variable;
    given[variable] = "by " + variable;
    EXPECT_EQ(name(given), "by " + variable);
  }
}

TEST(JobName, IsNotAnAllocationsInWhichSeveralJobsMayRun) {
  EXPECT_EQ(name({{"SLURM_JOB_ID", "77"}}), "");
  EXPECT_EQ(name({{"SLURM_STEP_ID", "2"}}), "");
}

TEST(RestartCount, IsTheLaunchers) {
  auto count = [](const Variables& variables) { return restart_count(lookup_in(variables)); };
  EXPECT_EQ(count({}), 0);
  EXPECT_EQ(count({{"TORCHELASTIC_RESTART_COUNT", "2"}}), 2);
  EXPECT_EQ(count({{"TORCHELASTIC_RESTART_COUNT", "2"}, {"LOCKSTEP_RESTART_COUNT", "3"}}), 3);
  for (const std::string variable : {"TORCHELASTIC_RESTART_COUNT", "LOCKSTEP_RESTART_COUNT"})
    expect_error<UsageError>([&] { count({{variable, "-1"}}); }, variable + " is \"-1\"", "whole number from 0");
}

}  // namespace
}  // namespace lockstep
