#include "launch/launch_plan.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "launch/cluster.h"
#include "launch/output.h"
#include "launch/report.h"
#include "rendezvous/rendezvous.h"
#include "support/temporary_folder.h"
#include "support/variables.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::optional<std::string> nothing(const std::string& name) {
  return name == "PATH" ? std::optional<std::string>("/usr/bin:/bin") : std::nullopt;
}

Environment::Lookup with_one(const std::string& variable, const std::string& value) {
  return [=](const std::string& name) { return name == variable ? std::optional(value) : nothing(name); };
}

LaunchOptions options_for(const std::string& workers) {
  LaunchOptions options;
  options.command = {"true"};
  options.workers_per_node = workers;
  return options;
}

template <class Function>
std::string refusal(Function&& function) {
  try {
    function();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

/// A host of files, as the kernel would show it.
class FakeHost {
 public:
  void write(const std::string& path, const std::string& text) const {
    auto full = folder_.path() / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  Machine machine() const { return Machine(folder_.path().string()); }

 private:
  TemporaryFolder folder_;
};

// --- the host

TEST(Machine, CountsTheCoresThatAControlGroupOfVersionTwoLeaves) {
  FakeHost host;
  host.write("proc/self/cgroup", "0::/job/step\n");
  host.write("sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  const int all = host.machine().usable_cores();
  EXPECT_EQ(all, static_cast<int>(host.machine().cores().size()));
  host.write("sys/fs/cgroup/job/cpu.max", "150000 100000\n");  // of the group around it
  EXPECT_EQ(host.machine().usable_cores(), 1);
  host.write("sys/fs/cgroup/job/cpu.max", "5000 100000\n");
  EXPECT_EQ(host.machine().usable_cores(), 1) << "never none";
}

TEST(Machine, CountsTheCoresThatAControlGroupOfVersionOneLeaves) {
  FakeHost host;
  host.write("proc/self/cgroup", "3:cpu,cpuacct:/docker/1\n");
  host.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n");  // in a container, at the top
  host.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(host.machine().usable_cores(), 1);
  host.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(host.machine().usable_cores(), static_cast<int>(host.machine().cores().size()));
}

TEST(Machine, CountsProcessesKilledForWantOfMemoryInBothVersions) {
  FakeHost host;
  EXPECT_EQ(host.machine().out_of_memory_kills(), std::nullopt);
  host.write("proc/self/cgroup", "4:memory:/a\n0::/b\n");
  host.write("sys/fs/cgroup/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n");
  EXPECT_EQ(host.machine().out_of_memory_kills(), 7);
  host.write("sys/fs/cgroup/b/memory.events", "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n");
  EXPECT_EQ(host.machine().out_of_memory_kills(), 2);
}

TEST(Machine, CountsGpusByDeviceUnlessTheEnvironmentChooses) {
  FakeHost host;
  EXPECT_EQ(host.machine().gpus(nothing), 0);
  for (const char* device : {"nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"})
    host.write(std::string("dev/") + device, "");
  EXPECT_EQ(host.machine().gpus(nothing), 3);
  EXPECT_EQ(host.machine().gpus(with_one("CUDA_VISIBLE_DEVICES", "1,2")), 2);
  EXPECT_EQ(host.machine().gpus(with_one("CUDA_VISIBLE_DEVICES", "0,-1,2")), 1);
  EXPECT_EQ(host.machine().gpus(with_one("CUDA_VISIBLE_DEVICES", "")), 0);
}

TEST(DealCores, GivesDisjointSetsOfEvenSize) {
  EXPECT_THAT(assign_cores({0, 1, 2, 3, 6}, 2), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3, 6)));
  EXPECT_THAT(assign_cores({4, 5}, 2), ElementsAre(ElementsAre(4), ElementsAre(5)));
  EXPECT_THAT(assign_cores({4}, 2), ElementsAre(IsEmpty(), IsEmpty()));
}

// --- the plan

TEST(Plan, CountsWorkersByNumberCoresOrGpus) {
  FakeHost host;
  auto workers = [&](const std::string& written) {
    return make_plan(options_for(written), host.machine(), nothing).workers;
  };
  const int cores = host.machine().usable_cores();
  EXPECT_EQ(workers("3"), 3);
  EXPECT_EQ(workers("cpu"), cores);
  EXPECT_EQ(workers("auto"), cores);
  EXPECT_THAT(refusal([&] { workers("gpu"); }), HasSubstr("no GPU is visible"));
  for (int gpu = 0; gpu < 5; ++gpu) host.write("dev/nvidia" + std::to_string(gpu), "");
  EXPECT_EQ(workers("gpu"), 5);
  EXPECT_EQ(workers("auto"), 5);
  for (const char* wrong : {"0", "-1", "many", "", "5000"})
    EXPECT_THAT(refusal([&] { workers(wrong); }), HasSubstr("auto, cpu or gpu")) << wrong;
}

TEST(Plan, SharesTheCoresAmongTheThreadsOfWorkersUnlessToldOtherwise) {
  FakeHost host;
  const int cores = host.machine().usable_cores();
  auto options = options_for("1");
  EXPECT_EQ(make_plan(options, host.machine(), nothing).threads, cores);
  options.workers_per_node = "64";
  EXPECT_EQ(make_plan(options, host.machine(), nothing).threads, std::max(1, cores / 64));
  EXPECT_EQ(make_plan(options, host.machine(), with_one("OMP_NUM_THREADS", "5")).threads, 0) << "left alone";
  options.omp_threads = 7;
  EXPECT_EQ(make_plan(options, host.machine(), nothing).threads, 7);
}

TEST(Plan, RefusesWhatMakesNoSenseAndSaysTheRemedy) {
  auto refused = [](auto change) {
    auto options = options_for("2");
    change(options);
    return refusal([&] { make_plan(options, Machine(), nothing); });
  };
  EXPECT_THAT(refused([](auto& o) { o.command.clear(); }), HasSubstr("no program to run"));
  EXPECT_THAT(refused([](auto& o) { o.command = {"no-such-program"}; }),
              HasSubstr("no program no-such-program in PATH"));
  EXPECT_THAT(refused([](auto& o) { o.command = {"/no/such"}; }), HasSubstr("cannot run /no/such"));
  EXPECT_THAT(refused([](auto& o) { o.command = {"/etc/passwd"}; }), HasSubstr("chmod +x /etc/passwd"));
  EXPECT_THAT(refused([](auto& o) { o.nodes = 0; }), HasSubstr("--nnodes is 0"));
  EXPECT_THAT(refused([](auto& o) { o.nodes = 2, o.node_rank = 2; }), HasSubstr("from 0 to 1"));
  EXPECT_THAT(refused([](auto& o) { o.nodes = 2; }), HasSubstr("--master-addr"));
  EXPECT_THAT(refused([](auto& o) { o.standalone = true, o.nodes = 2; }), HasSubstr("--standalone"));
  EXPECT_THAT(refused([](auto& o) { o.master_port = 70000; }), HasSubstr("--master-port is 70000"));
  EXPECT_THAT(refused([](auto& o) { o.max_restarts = -1; }), HasSubstr("--max-restarts"));
  EXPECT_THAT(refused([](auto& o) { o.redirects = "3"; }), HasSubstr("--log-dir"));
  EXPECT_THAT(refused([](auto& o) { o.log_dir = "x", o.tee = "4"; }), HasSubstr("--tee is \"4\""));
  EXPECT_THAT(refused([](auto& o) { o.log_dir = "x", o.tee = "2:1"; }), HasSubstr("--tee is \"2:1\""));
  EXPECT_THAT(refused([](auto& o) { o.shown_ranks = {2}; }), HasSubstr("local rank 2"));
  EXPECT_THAT(refused([](auto& o) { o.bind = true, o.workers_per_node = "4000"; }), HasSubstr("--bind"));
}

TEST(Plan, RoutesStreamsToTheConsoleAndToFiles) {
  auto options = options_for("3");
  auto routes = [&] { return make_plan(options, Machine(), nothing).routes; };
  EXPECT_EQ(routes()[0].out, (OutputRoute{true, false}));
  options.log_dir = "logs";
  EXPECT_EQ(routes()[0].out, (OutputRoute{true, true}));
  options.redirects = "3";
  options.tee = "0:1,2:2";
  EXPECT_EQ(routes()[0].out, (OutputRoute{true, true}));
  EXPECT_EQ(routes()[0].err, (OutputRoute{false, true}));
  EXPECT_EQ(routes()[1].err, (OutputRoute{false, true}));
  EXPECT_EQ(routes()[2].err, (OutputRoute{true, true}));
  options.shown_ranks = {2};
  EXPECT_EQ(routes()[0].out, (OutputRoute{false, true}));
  EXPECT_EQ(routes()[2].err, (OutputRoute{true, true}));
}

TEST(Plan, NamesTheRankTheNodeAndTheGenerationInTheEnvironment) {
  auto options = options_for("2");
  options.nodes = 2;
  options.node_rank = 1;
  options.master_addr = "node0";
  const auto plan = make_plan(options, Machine(), with_one("LOCKSTEP_JOB_ID", "job7"));
  EXPECT_EQ(plan.job_id, "job7");
  Layout layout;
  layout.first_rank = 3;
  layout.world_size = 5;
  layout.generation = 2;
  layout.store = {"node0", 4711};
  layout.job_id = "job7";
  auto variables = worker_variables(options, plan, layout, 1, "/s");
  EXPECT_EQ(variables["RANK"], "4");
  EXPECT_EQ(variables["LOCAL_RANK"], "1");
  EXPECT_EQ(variables["WORLD_SIZE"], "5");
  EXPECT_EQ(variables["LOCAL_WORLD_SIZE"], "2");
  EXPECT_EQ(variables["GROUP_RANK"], "1");
  EXPECT_EQ(variables["NODE_RANK"], "1");
  EXPECT_EQ(variables["MASTER_ADDR"], "node0");
  EXPECT_EQ(variables["MASTER_PORT"], "4711");
  EXPECT_EQ(variables["LOCKSTEP_STORE_HOSTED"], "1");
  EXPECT_EQ(variables["LOCKSTEP_JOB_ID"], "job7");
  EXPECT_EQ(variables["LOCKSTEP_RESTART_COUNT"], "2");
  EXPECT_EQ(variables["TORCHELASTIC_RESTART_COUNT"], "2");
  EXPECT_EQ(variables["LOCKSTEP_SECRET_FILE"], "/s");
  EXPECT_FALSE(variables.contains("CUDA_VISIBLE_DEVICES"));
  EXPECT_FALSE(variables.contains("ROLE_NAME"));
}

// --- which node this is

NodePlace node_of(const Variables& variables, const LaunchOptions& options = {}) {
  return find_node(options, lookup_in(variables));
}

const Variables kSrun{{"SLURM_PROCID", "2"},
                      {"SLURM_STEP_NUM_TASKS", "3"},
                      {"SLURM_LOCALID", "0"},
                      {"SLURM_NODEID", "2"},
                      {"SLURM_STEP_TASKS_PER_NODE", "1(x3)"},
                      {"SLURM_STEP_NODELIST", "node[07-09]"},
                      {"SLURM_JOB_ID", "41"},
                      {"SLURM_STEP_ID", "0"}};

const Variables kMpirun{{"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                        {"PMIX_NAMESPACE", "591200257"}};

TEST(Nodes, AreOneAtAPortOfTheSystemsWhenNobodySaysOtherwise) {
  EXPECT_EQ(node_of({}), (NodePlace{1, 0, {"127.0.0.1", 0}}));
  EXPECT_EQ(node_of({{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "tcp://10.0.0.1:29500"}}),
            (NodePlace{1, 0, {"127.0.0.1", 0}}))
      << "what one node does not need may be anything";
  EXPECT_EQ(node_of({{"JOB_COMPLETION_INDEX", "3"}}), (NodePlace{1, 0, {"127.0.0.1", 0}}))
      << "pods that know nothing of each other";
}

TEST(Nodes, AreTheTasksOfSrun) {
  const auto place = node_of(kSrun);
  EXPECT_EQ(place.nodes, 3);
  EXPECT_EQ(place.rank, 2);
  EXPECT_EQ(place.store.host, "node07");
  EXPECT_EQ(place.store.port, job_port([](const std::string& name) {
              return name == "LOCKSTEP_JOB_ID" ? std::optional<std::string>("41.0") : std::nullopt;
            }));
  EXPECT_NE(place.store.port, node_of(with(kSrun, {{"SLURM_STEP_ID", "1"}})).store.port);
  const Variables batch_script{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "3"}, {"SLURM_JOB_ID", "41"}};
  EXPECT_EQ(node_of(batch_script).nodes, 1) << "srun has not started it";
  EXPECT_EQ(node_of(with(kSrun, {{"SLURM_PROCID", "0"},
                                 {"SLURM_NODEID", "0"},
                                 {"SLURM_STEP_NUM_TASKS", "1"},
                                 {"SLURM_STEP_TASKS_PER_NODE", "1"}})),
            (NodePlace{1, 0, {"127.0.0.1", 0}}));
}

TEST(Nodes, AreTheProcessesOfMpirun) {
  auto place = node_of(with(kMpirun, {{"MASTER_ADDR", "node7"}}));
  EXPECT_EQ(place.nodes, 2);
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.store.host, "node7");
  EXPECT_EQ(node_of(with(kMpirun, {{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "4711"}})).store,
            (Endpoint{"node7", 4711}));
  EXPECT_EQ(node_of(with(kMpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})).store.host, "127.0.0.1");
  EXPECT_THAT(refusal([&] { node_of(kMpirun); }),
              AllOf(HasSubstr("of 2 launchers that Open MPI started only 1 are on this host"),
                    HasSubstr("--master-addr"), HasSubstr("MASTER_ADDR")));
}

TEST(Nodes, AreNumberedByKubernetesWhereTheirNumberIsSaid) {
  LaunchOptions options;
  options.nodes = 4;
  const Variables pod{{"JOB_COMPLETION_INDEX", "3"}, {"MASTER_ADDR", "train-0.train"}};
  EXPECT_EQ(node_of(pod, options), (NodePlace{4, 3, {"train-0.train", 29500}}));
  options.nodes = 3;
  EXPECT_THAT(refusal([&] { node_of(pod, options); }),
              AllOf(HasSubstr("JOB_COMPLETION_INDEX is 3"), HasSubstr("from 0 to 2"), HasSubstr("completions")));
  EXPECT_THAT(refusal([&] {
                node_of({{"JOB_COMPLETION_INDEX", "x"}, {"MASTER_ADDR", "a"}}, options);
              }),
              HasSubstr("JOB_COMPLETION_INDEX is \"x\""));
}

TEST(Nodes, AreAsTheOptionsSayWhateverStartedThem) {
  LaunchOptions options;
  options.node_rank = 0;
  options.master_addr = "other";
  options.master_port = 5;
  EXPECT_EQ(node_of(kSrun, options), (NodePlace{3, 0, {"other", 5}}));
  options.nodes = 7;
  options.node_rank = 6;
  EXPECT_EQ(node_of(with(kMpirun, {{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "4711"}}), options),
            (NodePlace{7, 6, {"other", 5}}));
  options = {};
  options.nodes = 1;
  EXPECT_EQ(node_of(kSrun, options), (NodePlace{1, 0, {"127.0.0.1", 0}}));
  options = {};
  options.standalone = true;
  EXPECT_EQ(node_of(kMpirun, options), (NodePlace{1, 0, {"127.0.0.1", 0}}));
  options = {};
  options.nodes = 4;
  EXPECT_THAT(refusal([&] { node_of(kSrun, options); }),
              AllOf(HasSubstr("--nnodes is 4, but Slurm started 3 launchers"), HasSubstr("--node-rank")));
}

TEST(Nodes, AreNotThoseOfTheLauncherWhoseWorkerThisIs) {
  EXPECT_EQ(node_of(with(kMpirun, {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node7"}})),
            (NodePlace{1, 0, {"127.0.0.1", 0}}));
}

TEST(Nodes, AreRefusedWhereTheVariablesAreHalfSet) {
  EXPECT_THAT(refusal([&] {
                node_of({{"OMPI_COMM_WORLD_SIZE", "2"}});
              }),
              AllOf(HasSubstr("OMPI_COMM_WORLD_RANK is not set"), HasSubstr("--standalone")));
}

// --- lines

TEST(LineCutter, KeepsWhatHasNoEndYet) {
  LineCutter cutter;
  EXPECT_THAT(cutter.feed("ab"), IsEmpty());
  EXPECT_THAT(cutter.feed("c\n\nd"), ElementsAre("abc", ""));
  EXPECT_EQ(cutter.take_rest(), "d");
  EXPECT_EQ(cutter.take_rest(), "");
}

TEST(LineCutter, HasTheStateOfAProgressBar) {
  LineCutter cutter;
  EXPECT_THAT(cutter.feed("epoch 1"), IsEmpty());
  EXPECT_EQ(cutter.progress(), "") << "an ordinary line that is not complete";
  EXPECT_THAT(cutter.feed("\r10 %"), IsEmpty());
  EXPECT_EQ(cutter.progress(), "10 %");
  EXPECT_THAT(cutter.feed("\r2"), IsEmpty());
  EXPECT_THAT(cutter.feed("0 %\r"), IsEmpty());
  EXPECT_EQ(cutter.progress(), "20 %");
  EXPECT_THAT(cutter.feed("\rdone\nnext\r\nlast\r"), ElementsAre("done", "next"));
  EXPECT_EQ(cutter.take_rest(), "last");
  EXPECT_EQ(cutter.progress(), "");
}

TEST(LineCutter, KeepsOnlyTheLastStateOfAProgressBar) {
  LineCutter cutter;
  for (size_t update = 0; update < LineCutter::kLongest / 4; ++update)  // together longer than a line may be
    ASSERT_THAT(cutter.feed("state " + std::to_string(update) + "\r"), IsEmpty());
  EXPECT_EQ(cutter.progress(), "state " + std::to_string(LineCutter::kLongest / 4 - 1));
}

TEST(StderrMemory, RemembersTheLastLinesAndWhatNobodyCaught) {
  StderrMemory memory;
  for (int line = 0; line < 30; ++line) memory.add(std::to_string(line));
  EXPECT_EQ(memory.tail().size(), 20u);
  EXPECT_EQ(memory.tail().front(), "10");
  EXPECT_EQ(memory.uncaught(), "");
  memory.add("terminate called after throwing an instance of 'std::runtime_error'");
  EXPECT_EQ(memory.uncaught(), "std::runtime_error");
  memory.add("  what():  no data");
  EXPECT_EQ(memory.uncaught(), "std::runtime_error: no data");
  memory.add("libc++abi: terminating with uncaught exception of type lockstep::PeerError: gone: far");
  EXPECT_EQ(memory.uncaught(), "lockstep::PeerError: gone: far");
  memory.add("terminate called after throwing an instance of 'std::_Nested_exception<lockstep::Error>'");
  memory.add("  what():  rank 1: no data");
  EXPECT_EQ(memory.uncaught(), "lockstep::Error: rank 1: no data");
  memory.add("libc++abi: terminating with uncaught exception of type std::__1::__nested<lockstep::Error>: no data");
  EXPECT_EQ(memory.uncaught(), "lockstep::Error: no data");
}

// --- the report

WorkerEnd end_of(int rank, int status) {
  WorkerEnd end;
  end.rank = rank;
  end.pid = 100 + rank;
  end.host = "h";
  end.status = status;
  end.description = describe_status(status, false);
  return end;
}

TEST(Report, SaysInWordsHowAProcessEnded) {
  EXPECT_EQ(describe_status(3 << 8, false), "exit code 3");
  EXPECT_THAT(describe_status(139 << 8, false), HasSubstr("exit code 139 (from a shell: its command was killed"));
  EXPECT_EQ(describe_status(SIGSEGV, false), "killed by SIGSEGV (Segmentation fault)");
  EXPECT_EQ(describe_status(SIGKILL, false), "killed by SIGKILL (Killed)");
  EXPECT_THAT(describe_status(SIGKILL, true), HasSubstr("killed: out of memory"));
}

Failure gone(int rank) {
  return {ErrorKind::kPeer, "rank " + std::to_string(rank) + " is gone", Culprit{rank, CulpritRole::kGone}};
}

TEST(Report, BlamesTheRankThatTheStoreNamedElseTheFirst) {
  const std::vector<WorkerEnd> ends{end_of(3, 0), end_of(0, 1 << 8), end_of(1, 1 << 8), end_of(2, SIGKILL)};
  auto report = make_report(ends, std::nullopt);
  EXPECT_EQ(report.culprit->rank, 0);
  EXPECT_EQ(report.exit, LaunchExit::kWorkerFailed);
  EXPECT_EQ(report.ended_before.at(0).rank, 3);
  EXPECT_EQ(report.consequences.size(), 2u);
  report = make_report(ends, gone(2));
  EXPECT_EQ(report.culprit->rank, 2);
  EXPECT_EQ(report.exit, LaunchExit::kWorkerKilled);
  report = make_report(ends, gone(3));
  EXPECT_EQ(report.culprit->rank, 3) << "it ended well, but too early for the others";
  EXPECT_EQ(report.exit, LaunchExit::kWorkerFailed);
  EXPECT_EQ(report.culprit->description, "exit code 0, while other ranks still needed it");
  EXPECT_EQ(report.consequences.size(), 3u);
  EXPECT_TRUE(report.ended_before.empty());
  EXPECT_EQ(make_report({end_of(0, 0), end_of(1, 0)}, gone(1)).exit, LaunchExit::kSuccess);
  EXPECT_EQ(make_report({end_of(0, 0)}, std::nullopt).exit, LaunchExit::kSuccess);
}

TEST(Report, DoesNotTakeTheWayAWorkerWasStoppedForTheCause) {
  auto stopped = end_of(1, SIGTERM);
  stopped.after_stop = stopped.was_stopped = true;
  auto report = make_report({end_of(0, 1 << 8), stopped},
                            Failure{ErrorKind::kPeer, "rank 1 gave up", Culprit{1, CulpritRole::kGaveUp}});
  EXPECT_EQ(report.culprit->rank, 1);
  EXPECT_EQ(report.culprit->description, "stopped with the others (killed by SIGTERM (Terminated))");
  EXPECT_EQ(report.exit, LaunchExit::kWorkerFailed);
  auto killed = end_of(1, SIGTERM);
  killed.after_stop = true;  // its end was heard of late
  EXPECT_EQ(make_report({end_of(0, 1 << 8), killed}, gone(1)).exit, LaunchExit::kWorkerKilled);
  report = make_report({stopped, end_of(2, 1 << 8)}, std::nullopt);  // of two nodes
  EXPECT_EQ(report.culprit->rank, 2);
  EXPECT_EQ(report.consequences.at(0).rank, 1);
}

TEST(Report, ASilentRankWasFrozenHoweverItEndedLater) {
  auto aborted = end_of(1, SIGABRT);
  aborted.after_stop = true;
  aborted.uncaught = "lockstep::PeerError: rank 1: rank 0 sent no heartbeat for 5 s";
  auto other = end_of(0, SIGABRT);
  other.uncaught = "lockstep::PeerError: rank 0: rank 0 sent no heartbeat for 5 s";
  const auto report = make_report({other, aborted}, Failure{ErrorKind::kPeer, "rank 1 sent no heartbeat for 5 s",
                                                            Culprit{1, CulpritRole::kSilent}});
  EXPECT_EQ(report.culprit->rank, 1);
  EXPECT_EQ(report.culprit->description, "stopped answering (ended later: killed by SIGABRT (Aborted))");
  EXPECT_EQ(report.exit, LaunchExit::kWorkerFailed);
  EXPECT_EQ(report.consequences.size(), 1u) << "however alike the errors are";
  const auto words = describe_report(report);
  EXPECT_THAT(words,
              AllOf(HasSubstr("is to blame: stopped answering"), HasSubstr("host or network"), Not(HasSubstr("gdb"))));
  EXPECT_THAT(report_to_json(report), AllOf(HasSubstr("stopped answering"), HasSubstr("host or network")));
}

TEST(Report, NamesTheRanksThatFailedWithTheSameErrorOfTheirOwn) {
  std::vector<WorkerEnd> ends;
  for (int rank : {2, 0, 1, 3, 5, 4}) {
    ends.push_back(end_of(rank, SIGABRT));
    ends.back().uncaught = "lockstep::UsageError: rank " + std::to_string(rank) + ": no such backend";
  }
  ends[3].uncaught = "lockstep::PeerError: rank 3: rank 2 is gone";
  ends[5].uncaught = "";
  const auto report = make_report(ends, std::nullopt);
  EXPECT_EQ(report.culprit->rank, 2);
  EXPECT_EQ(report.same_error.size(), 3u);
  EXPECT_EQ(report.consequences.size(), 2u);
  const auto words = describe_report(report);
  EXPECT_THAT(words, AllOf(HasSubstr("  ranks 0-1 and 5: the same error\n"),
                           HasSubstr("failed as a consequence: ranks 3 (killed by SIGABRT (Aborted)) and 4"),
                           HasSubstr("rank 2 (pid 102 on h) and ranks 0-1 and 5 are to blame")));
  EXPECT_THAT(report_to_json(report), HasSubstr("\"same_error\":[{\"rank\":0"));
}

TEST(Report, SaysEachThingOnce) {
  auto thrown = end_of(0, SIGABRT);
  StderrMemory memory;
  for (const char* line :
       {"reading", "terminate called after throwing an instance of 'c10::Error'", "  what():  no data in shard 3",
        "Exception raised from read at data.cpp:7", "frame #0: c10::Error::Error", "frame #1: read"})
    memory.add(line);
  thrown.uncaught = memory.uncaught();
  thrown.tail = {memory.tail().begin(), memory.tail().end()};
  const auto text = describe_report(make_report(
      {thrown}, Failure{ErrorKind::kPeer, "rank 0 gave up: no data in shard 3", Culprit{0, CulpritRole::kGaveUp}}));
  EXPECT_EQ(text.find("no data in shard 3"), text.rfind("no data in shard 3")) << text;
  EXPECT_THAT(text,
              AllOf(HasSubstr("c10::Error: no data"), HasSubstr("| reading"), HasSubstr("| Exception raised from"),
                    Not(HasSubstr("frame #")), Not(HasSubstr("terminate called"))));
}

TEST(Report, SaysHowToFindThePlaceOfACrash) {
  auto report = make_report({end_of(0, SIGSEGV)}, std::nullopt);
  report.command = {"./train", "--name", "two words"};
  EXPECT_THAT(describe_report(report), HasSubstr("gdb -batch -ex run -ex bt --args ./train --name 'two words'"));
}

TEST(Report, TravelsBetweenNodesWithAnyBytes) {
  auto end = end_of(1, SIGSEGV);
  end.tail = {"tab\t", "\xff\xfe", "quote \""};
  end.uncaught = "E: w";
  end.after_stop = end.was_stopped = true;
  const auto back = unpack_ends(pack_ends({end}));
  ASSERT_EQ(back.size(), 1u);
  EXPECT_EQ(back[0].status, SIGSEGV);
  EXPECT_EQ(back[0].tail[0], "tab\t");
  EXPECT_EQ(back[0].tail.size(), 3u);
  EXPECT_TRUE(back[0].after_stop);
  EXPECT_TRUE(back[0].was_stopped);
}

TEST(Decide, DoesNotBlameAWorkerThatWasPreempted) {
  const int preempted = static_cast<int>(LaunchExit::kPreempted) << 8;
  Outcome outcome;
  outcome.ends = {end_of(1, preempted), end_of(0, preempted)};
  const auto verdict = decide(outcome, std::nullopt, 0, 1);
  EXPECT_TRUE(verdict.restart);
  EXPECT_EQ(verdict.report.exit, LaunchExit::kPreempted);
  EXPECT_FALSE(verdict.report.culprit);
  EXPECT_EQ(verdict.report.message, "rank 1 was preempted (exit code 6)");
  EXPECT_FALSE(decide(outcome, std::nullopt, 1, 1).restart);
  outcome.ends = {end_of(1, 1 << 8), end_of(0, preempted)};
  EXPECT_EQ(decide(outcome, std::nullopt, 1, 1).report.exit, LaunchExit::kWorkerFailed) << "a failure came first";
}

TEST(Decide, RestartsAfterAFailureWhileRestartsAreLeftAndNeverWhenToldToStop) {
  Outcome failed;
  failed.ends = {end_of(0, 1 << 8)};
  EXPECT_TRUE(decide(failed, std::nullopt, 0, 1).restart);
  EXPECT_FALSE(decide(failed, std::nullopt, 1, 1).restart);
  EXPECT_EQ(decide(failed, std::nullopt, 1, 1).report.restarts, 1);
  failed.signal = SIGTERM;
  EXPECT_FALSE(decide(failed, std::nullopt, 0, 1).restart);
  EXPECT_EQ(decide(failed, std::nullopt, 0, 1).report.exit, LaunchExit::kPreempted);
  failed.broken = "it is";
  EXPECT_EQ(decide(failed, std::nullopt, 0, 1).report.exit, LaunchExit::kInternal);
  EXPECT_FALSE(decide(failed, std::nullopt, 0, 1).restart);
  failed.signal.reset();
  EXPECT_TRUE(decide(failed, std::nullopt, 0, 1).restart) << "a supervisor that was killed";
  EXPECT_FALSE(decide(failed, std::nullopt, 1, 1).restart);
}

}  // namespace
}  // namespace lockstep
