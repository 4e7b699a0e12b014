#include <lockstep/environment.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "support/variables.h"

namespace lockstep {
namespace {

Environment detect(const Variables& variables) {
  return Environment::detect(lookup_in(variables));
}

/// What detect() refuses these variables with.
std::string refusal(const Variables& variables) {
  try {
    auto found = detect(variables);
    return "accepted as rank " + std::to_string(found.rank) + " of " + std::to_string(found.world_size);
  } catch (const UsageError& error) {
    return error.what();
  }
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kRankAndSize{{"RANK", "1"}, {"WORLD_SIZE", "4"}};
const Variables kTorchrunRank{{"RANK", "5"},
                              {"WORLD_SIZE", "8"},
                              {"LOCAL_RANK", "1"},
                              {"LOCAL_WORLD_SIZE", "4"},
                              {"MASTER_ADDR", "10.0.0.1"},
                              {"MASTER_PORT", "29500"}};
const Variables kOpenMpiRank{{"OMPI_COMM_WORLD_RANK", "2"},
                             {"OMPI_COMM_WORLD_SIZE", "6"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kPmi{{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSbatch{{"SLURM_JOB_ID", "77"},
                        {"SLURM_PROCID", "0"},
                        {"SLURM_NTASKS", "7"},
                        {"SLURM_TASKS_PER_NODE", "2(x3),1"},
                        {"SLURM_NODEID", "0"},
                        {"SLURM_LOCALID", "0"},
                        {"SLURM_JOB_NODELIST", "node[01-03,07]"}};
const Variables kSrunRank = with(kSbatch, {{"SLURM_STEP_ID", "0"},
                                           {"SLURM_STEP_NUM_TASKS", "7"},
                                           {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                                           {"SLURM_STEP_NODELIST", "node[01-03,07]"},
                                           {"SLURM_PROCID", "3"},
                                           {"SLURM_NODEID", "1"},
                                           {"SLURM_LOCALID", "1"}});

TEST(Environment, IsOneProcessWhenNothingIsSet) {
  auto found = detect({});
  EXPECT_EQ(found, Environment{});
  EXPECT_EQ(found.rank, 0);
  EXPECT_EQ(found.world_size, 1);
  EXPECT_EQ(found.local_rank, 0);
  EXPECT_EQ(found.local_world_size, 1);
  EXPECT_EQ(found.master_addr, "");
  EXPECT_EQ(found.master_port, 0);
  EXPECT_EQ(found.source, "single process");
}

TEST(Environment, ReadsTheProcessEnvironment) {
  setenv("RANK", "1", 1);
  setenv("WORLD_SIZE", "3", 1);
  auto found = Environment::detect();
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(found.rank, 1);
  EXPECT_EQ(found.world_size, 3);
}

TEST(Environment, ReadsTorchrun) {
  Environment expected{.rank = 5,
                       .world_size = 8,
                       .local_rank = 1,
                       .local_world_size = 4,
                       .local_assumed = false,
                       .master_addr = "10.0.0.1",
                       .master_port = 29500,
                       .source = "torchrun variables"};
  EXPECT_EQ(detect(kTorchrunRank), expected);
}

TEST(Environment, ReadsOpenMpi) {
  Environment expected{.rank = 2,
                       .world_size = 6,
                       .local_rank = 0,
                       .local_world_size = 2,
                       .local_assumed = false,
                       .master_addr = "",
                       .master_port = 0,
                       .source = "Open MPI"};
  EXPECT_EQ(detect(kOpenMpiRank), expected);
}

TEST(Environment, ReadsMpich) {
  Environment expected{.rank = 3,
                       .world_size = 4,
                       .local_rank = 1,
                       .local_world_size = 2,
                       .local_assumed = false,
                       .master_addr = "",
                       .master_port = 0,
                       .source = "MPICH/PMI"};
  EXPECT_EQ(detect(kPmi), expected);
}

TEST(Environment, ReadsSrun) {
  Environment expected{.rank = 3,
                       .world_size = 7,
                       .local_rank = 1,
                       .local_world_size = 2,
                       .local_assumed = false,
                       .master_addr = "node01",
                       .master_port = 0,
                       .source = "Slurm"};
  EXPECT_EQ(detect(kSrunRank), expected);
}

TEST(Environment, PrefersTheSourcesInTheirOrder) {
  auto all = kSrunRank;
  EXPECT_EQ(detect(all).source, "Slurm");
  all.insert(kPmi.begin(), kPmi.end());
  EXPECT_EQ(detect(all).source, "MPICH/PMI");
  all.insert(kOpenMpiRank.begin(), kOpenMpiRank.end());
  EXPECT_EQ(detect(all).source, "Open MPI");
  all.insert(kTorchrunRank.begin(), kTorchrunRank.end());
  EXPECT_EQ(detect(all).source, "torchrun variables");
}

TEST(Environment, TakesMasterAddressAndPortUnderEverySource) {
  for (const auto& source : {Variables{}, kRankAndSize, kOpenMpiRank, kPmi, kSrunRank}) {
    auto found = detect(with(source, {{"MASTER_ADDR", "fe80::7"}, {"MASTER_PORT", "65535"}}));
    EXPECT_EQ(found.master_addr, "fe80::7") << found.source;
    EXPECT_EQ(found.master_port, 65535) << found.source;
  }
}

TEST(Environment, PutsRanksStartedByHandOnOneHostWithoutAnAddressThatOthersReach) {
  for (const auto& address : {"", "localhost", "127.0.0.1", "::1", "[::1]"}) {
    auto found = detect(*address == '\0' ? kRankAndSize : with(kRankAndSize, {{"MASTER_ADDR", address}}));
    EXPECT_EQ(found.local_rank, 1) << address;
    EXPECT_EQ(found.local_world_size, 4) << address;
    EXPECT_TRUE(found.local_assumed) << address;
  }
}

TEST(Environment, PutsRanksStartedByHandOnOneHostEachWithAnAddressThatOthersReach) {
  auto found = detect(with(kRankAndSize, {{"MASTER_ADDR", "10.0.0.1"}}));
  EXPECT_EQ(found.local_rank, 0);
  EXPECT_EQ(found.local_world_size, 1);
  EXPECT_TRUE(found.local_assumed);
}

TEST(Environment, TakesLocalRankAloneOnOneHost) {
  auto found = detect(with(kRankAndSize, {{"LOCAL_RANK", "2"}}));
  EXPECT_EQ(found.local_rank, 2);
  EXPECT_EQ(found.local_world_size, 4);
  EXPECT_TRUE(found.local_assumed);
  EXPECT_EQ(refusal(with(kRankAndSize, {{"LOCAL_RANK", "4"}})),
            "LOCAL_RANK is \"4\" but WORLD_SIZE is 4: ranks count from 0, so LOCAL_RANK must be 0 to 3");
}

TEST(Environment, RefusesHalfOfTheLocalPair) {
  EXPECT_EQ(refusal(without(kTorchrunRank, "LOCAL_WORLD_SIZE")),
            "LOCAL_RANK is \"1\" but LOCAL_WORLD_SIZE is not set: set both");
  EXPECT_EQ(refusal(without(kTorchrunRank, "LOCAL_RANK")),
            "LOCAL_WORLD_SIZE is \"4\" but LOCAL_RANK is not set: set both");
  EXPECT_EQ(refusal(with(kRankAndSize, {{"LOCAL_WORLD_SIZE", "2"}})),
            "LOCAL_WORLD_SIZE is \"2\" but LOCAL_RANK is not set: set both");
}

TEST(Environment, RefusesHalfOfAWorld) {
  EXPECT_EQ(refusal({{"RANK", "1"}}), "RANK is \"1\" but WORLD_SIZE is not set: set both");
  EXPECT_EQ(refusal({{"WORLD_SIZE", "4"}}), "WORLD_SIZE is \"4\" but RANK is not set: set both");
  EXPECT_EQ(refusal(without(kOpenMpiRank, "OMPI_COMM_WORLD_SIZE")),
            "OMPI_COMM_WORLD_RANK is \"2\" but OMPI_COMM_WORLD_SIZE is not set: set both");
  EXPECT_EQ(refusal(without(kPmi, "PMI_RANK")), "PMI_SIZE is \"4\" but PMI_RANK is not set: set both");
  EXPECT_EQ(refusal(without(kSrunRank, "SLURM_PROCID")),
            "SLURM_STEP_NUM_TASKS is \"7\" but SLURM_PROCID is not set: set both");
}

TEST(Environment, NamesTheVariableThatIsNotANumber) {
  for (const auto& value :
       {"", " ", "four", "1x", "1 ", " 1", "+1", "-1", "1.0", "0x1", "2147483648", "99999999999999"}) {
    const std::string is = std::string(" is \"") + value + "\": it must be a whole number from ";
    EXPECT_EQ(refusal(with(kTorchrunRank, {{"RANK", value}})), "RANK" + is + "0 to 2147483647");
    EXPECT_EQ(refusal(with(kTorchrunRank, {{"WORLD_SIZE", value}})), "WORLD_SIZE" + is + "1 to 2147483647");
    EXPECT_EQ(refusal(with(kTorchrunRank, {{"LOCAL_RANK", value}})), "LOCAL_RANK" + is + "0 to 2147483647");
    EXPECT_EQ(refusal(with(kTorchrunRank, {{"LOCAL_WORLD_SIZE", value}})), "LOCAL_WORLD_SIZE" + is + "1 to 2147483647");
    EXPECT_EQ(refusal(with(kTorchrunRank, {{"MASTER_PORT", value}})), "MASTER_PORT" + is + "1 to 65535");
    EXPECT_EQ(refusal(with(kRankAndSize, {{"LOCAL_RANK", value}})), "LOCAL_RANK" + is + "0 to 2147483647");
  }
}

TEST(Environment, NamesTheLaunchersVariableThatIsNotANumber) {
  auto expect_named = [](const Variables& source, const std::string& variable, const std::string& least) {
    EXPECT_EQ(refusal(with(source, {{variable, "two"}})),
              variable + " is \"two\": it must be a whole number from " + least + " to 2147483647");
  };
  expect_named(kOpenMpiRank, "OMPI_COMM_WORLD_RANK", "0");
  expect_named(kOpenMpiRank, "OMPI_COMM_WORLD_SIZE", "1");
  expect_named(kOpenMpiRank, "OMPI_COMM_WORLD_LOCAL_RANK", "0");
  expect_named(kOpenMpiRank, "OMPI_COMM_WORLD_LOCAL_SIZE", "1");
  expect_named(kPmi, "PMI_RANK", "0");
  expect_named(kPmi, "PMI_SIZE", "1");
  expect_named(kPmi, "MPI_LOCALRANKID", "0");
  expect_named(kPmi, "MPI_LOCALNRANKS", "1");
  expect_named(kSrunRank, "SLURM_PROCID", "0");
  expect_named(kSrunRank, "SLURM_STEP_NUM_TASKS", "1");
  expect_named(kSrunRank, "SLURM_LOCALID", "0");
  expect_named(kSrunRank, "SLURM_NODEID", "0");
}

TEST(Environment, RefusesAnEmptyWorldAndAPortOutOfRange) {
  EXPECT_EQ(refusal({{"RANK", "0"}, {"WORLD_SIZE", "0"}}),
            "WORLD_SIZE is \"0\": it must be a whole number from 1 to 2147483647");
  for (const std::string port : {"0", "65536"})
    EXPECT_EQ(refusal({{"MASTER_PORT", port}}),
              "MASTER_PORT is \"" + port + "\": it must be a whole number from 1 to 65535");
}

TEST(Environment, RefusesAnEmptyMasterAddress) {
  EXPECT_EQ(refusal({{"MASTER_ADDR", ""}}), "MASTER_ADDR is \"\": it must be the name or address of rank 0's host");
}

TEST(Environment, RefusesARankOutsideOfItsWorld) {
  EXPECT_EQ(refusal({{"RANK", "4"}, {"WORLD_SIZE", "4"}}),
            "RANK is \"4\" but WORLD_SIZE is 4: ranks count from 0, so RANK must be 0 to 3");
  EXPECT_EQ(refusal({{"RANK", "1"}, {"WORLD_SIZE", "1"}}),
            "RANK is \"1\" but WORLD_SIZE is 1: ranks count from 0, so RANK must be 0");
  EXPECT_EQ(refusal(with(kTorchrunRank, {{"LOCAL_RANK", "4"}})),
            "LOCAL_RANK is \"4\" but LOCAL_WORLD_SIZE is 4: ranks count from 0, so LOCAL_RANK must be 0 to 3");
  EXPECT_EQ(refusal(with(kOpenMpiRank, {{"OMPI_COMM_WORLD_RANK", "6"}})),
            "OMPI_COMM_WORLD_RANK is \"6\" but OMPI_COMM_WORLD_SIZE is 6: ranks count from 0, so OMPI_COMM_WORLD_RANK "
            "must be 0 to 5");
  EXPECT_EQ(refusal(with(kPmi, {{"MPI_LOCALRANKID", "2"}})),
            "MPI_LOCALRANKID is \"2\" but MPI_LOCALNRANKS is 2: ranks count from 0, so MPI_LOCALRANKID must be 0 to 1");
}

TEST(Environment, RefusesAHostLargerThanTheWorld) {
  EXPECT_EQ(refusal(with(kTorchrunRank, {{"LOCAL_WORLD_SIZE", "9"}})),
            "LOCAL_WORLD_SIZE is 9 but WORLD_SIZE is 8: a host cannot have more ranks than the job, so "
            "LOCAL_WORLD_SIZE must be 1 "
            "to 8");
}

TEST(Environment, NeedsTheLocalRankOfAnMpiLauncherUnlessItIsAlone) {
  EXPECT_EQ(refusal({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}),
            "MPI_LOCALRANKID is not set but PMI_RANK is: let the launcher set all of its variables, or set RANK, "
            "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE");
  EXPECT_EQ(refusal(without(kOpenMpiRank, "OMPI_COMM_WORLD_LOCAL_SIZE")),
            "OMPI_COMM_WORLD_LOCAL_RANK is \"0\" but OMPI_COMM_WORLD_LOCAL_SIZE is not set: set both");
  EXPECT_EQ(detect({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).local_world_size, 1);
}

TEST(Environment, IsOneProcessInAnSbatchScriptAndAnInteractiveShell) {
  EXPECT_EQ(detect(kSbatch), Environment{});
  EXPECT_EQ(detect(without(kSbatch, "SLURM_PROCID")), Environment{});
  EXPECT_EQ(detect(with(kSrunRank, {{"SLURM_STEP_ID", "4294967290"}})), Environment{}) << "salloc's interactive step";
  EXPECT_EQ(detect(with(kSbatch, {{"SLURM_STEP_ID", "4294967291"}})), Environment{}) << "the batch step";
}

TEST(Environment, TakesTheJobsTasksWhereSrunGivesNoStepTasks) {
  auto found = detect(with(kSbatch, {{"SLURM_STEP_ID", "2"}, {"SLURM_PROCID", "6"}, {"SLURM_NODEID", "3"}}));
  EXPECT_EQ(found.rank, 6);
  EXPECT_EQ(found.world_size, 7);
  EXPECT_EQ(found.local_world_size, 1);
  EXPECT_EQ(found.master_addr, "node01");
}

TEST(Environment, TakesTheStepNotTheJobUnderSrun) {
  auto found = detect(with(
      kSrunRank,
      {{"SLURM_STEP_NUM_TASKS", "5"}, {"SLURM_STEP_TASKS_PER_NODE", "1,4"}, {"SLURM_STEP_NODELIST", "node02,node07"}}));
  EXPECT_EQ(found.world_size, 5);
  EXPECT_EQ(found.local_world_size, 4);
  EXPECT_EQ(found.master_addr, "node02");
}

TEST(Environment, TakesSlurmsWordWhereSrunSpeaksPmi) {
  auto found = detect(with(kSrunRank, {{"PMI_RANK", "3"}, {"PMI_SIZE", "7"}}));
  EXPECT_EQ(found.source, "Slurm");
  EXPECT_EQ(found.local_world_size, 2);
}

TEST(Environment, ReadsSlurmsTasksPerNode) {
  auto local_size = [](const std::string& list, const std::string& node) {
    return detect(with(kSrunRank, {{"SLURM_STEP_TASKS_PER_NODE", list},
                                   {"SLURM_STEP_NUM_TASKS", "99"},
                                   {"SLURM_NODEID", node},
                                   {"SLURM_LOCALID", "0"}}))
        .local_world_size;
  };
  EXPECT_EQ(local_size("4", "0"), 4);
  EXPECT_EQ(local_size("2(x3),1", "0"), 2);
  EXPECT_EQ(local_size("2(x3),1", "2"), 2);
  EXPECT_EQ(local_size("2(x3),1", "3"), 1);
  EXPECT_EQ(local_size("3,2(x2),12(x10)", "12"), 12);
}

TEST(Environment, RefusesTasksPerNodeThatDoNotCoverTheNode) {
  for (const std::string list : {"", "x", "2(x", "2(x1", "2(x2),", "2(3)", "0(x2)", "2(x0)", "2(x2),junk", "2(x2)3",
                                 "2", "1,1(x2147483647),1(x2147483648)"})
    EXPECT_EQ(refusal(with(kSrunRank, {{"SLURM_STEP_TASKS_PER_NODE", list}})),
              "SLURM_STEP_TASKS_PER_NODE is \"" + list +
                  "\": it must be the tasks of every node, like \"2(x3),1\", with an entry for SLURM_NODEID 1");
}

TEST(Environment, RefusesALocalRankOutsideOfItsSlurmNode) {
  EXPECT_EQ(
      refusal(with(kSrunRank, {{"SLURM_LOCALID", "2"}})),
      "SLURM_LOCALID is \"2\" but SLURM_STEP_TASKS_PER_NODE for node 1 is 2: ranks count from 0, so SLURM_LOCALID "
      "must be 0 to 1");
  EXPECT_EQ(refusal(with(kSrunRank, {{"SLURM_STEP_TASKS_PER_NODE", "8(x2)"}})),
            "SLURM_STEP_TASKS_PER_NODE for node 1 is 8 but SLURM_STEP_NUM_TASKS is 7: a host cannot have more ranks "
            "than the job, "
            "so SLURM_STEP_TASKS_PER_NODE for node 1 must be 1 to 7");
}

TEST(Environment, NamesTheSlurmVariableThatIsMissing) {
  const std::string rest =
      " is not set but SLURM_PROCID is: let the launcher set all of its variables, or set RANK, WORLD_SIZE, LOCAL_RANK "
      "and LOCAL_WORLD_SIZE";
  for (const std::string variable : {"SLURM_NODEID", "SLURM_LOCALID"})
    EXPECT_EQ(refusal(without(kSrunRank, variable)), variable + rest);
  EXPECT_EQ(refusal(without(without(kSrunRank, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_TASKS_PER_NODE")),
            "SLURM_TASKS_PER_NODE" + rest);
}

TEST(Environment, FindsTheFirstHostOfASlurmList) {
  const std::vector<std::pair<std::string, std::string>> lists{{"node1", "node1"},
                                                               {"a,b", "a"},
                                                               {"node[01-03,07]", "node01"},
                                                               {"node[07,01],other", "node07"},
                                                               {"other,node[01-03]", "other"},
                                                               {"rack[2-3]n[5,9]-ib", "rack2n5-ib"}};
  for (const auto& [list, host] : lists)
    EXPECT_EQ(detect(with(kSrunRank, {{"SLURM_STEP_NODELIST", list}})).master_addr, host) << list;
}

TEST(Environment, RefusesASlurmListWithoutAHost) {
  for (const std::string list : {"", ",a", "node[", "node[01-03", "node[]", "node]", "node[01]]"}) {
    EXPECT_EQ(refusal(with(kSrunRank, {{"SLURM_STEP_NODELIST", list}})),
              "SLURM_STEP_NODELIST is \"" + list +
                  "\": it must be a list of hosts, like \"node[01-03,07],other\"; or set MASTER_ADDR");
    EXPECT_EQ(detect(with(kSrunRank, {{"SLURM_STEP_NODELIST", list}, {"MASTER_ADDR", "a"}})).master_addr, "a");
  }
}

TEST(Environment, LeavesTheAddressOpenWhereSlurmNamesNoHosts) {
  EXPECT_EQ(detect(without(without(kSrunRank, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST")).master_addr, "");
}

}  // namespace
}  // namespace lockstep
