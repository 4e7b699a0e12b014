#include "doctor/doctor.h"

#include <stdlib.h>

#include <algorithm>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "doctor/env_report.h"
#include "doctor/findings.h"
#include "support/temporary_folder.h"
#include "tools/doctor_facts.h"
#include "tools/script.h"

namespace lockstep::tool {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

const std::vector<Section> kSections{
    {"First", {{"check", Status::kOk, "fine"}, {"longer check", Status::kWarning, "so so", "mend it"}}},
    {"Second", {{"check", Status::kError, "a b", "do this"}}}};

TEST(Table, AlignsItsColumnsAndCounts) {
  EXPECT_EQ(to_table(kSections, {.columns = 80, .colour = false}),
            "First\n"
            "  ok       check         fine\n"
            "  warning  longer check  so so\n"
            "                         -> mend it\n"
            "\n"
            "Second\n"
            "  error    check         a b\n"
            "                         -> do this\n"
            "\n"
            "1 ok, 1 warning, 1 error\n");
}

TEST(Table, ColoursOnlyWhenToldTo) {
  EXPECT_THAT(to_table(kSections, {.columns = 80, .colour = true}), HasSubstr("\033[1;31merror  \033[0m"));
  EXPECT_THAT(to_table(kSections, {.columns = 80, .colour = false}), Not(HasSubstr("\033")));
}

TEST(Table, FitsIntoItsColumns) {
  const std::string path = "/usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so";
  const std::vector<Section> sections{{"S", {{"c", Status::kWarning, "many words in a row that wrap " + path, path}}}};
  for (int columns = 60; columns <= 120; ++columns) {
    std::istringstream lines(to_table(sections, {.columns = columns, .colour = false}));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(static_cast<int>(line.size()), columns) << line;
  }
  EXPECT_THAT(to_table(sections, {.columns = 120, .colour = false}), HasSubstr(path));
}

std::vector<std::string> checks_of(const Section& section) {
  std::vector<std::string> checks;
  for (const auto& finding : section.findings) checks.push_back(finding.check);
  return checks;
}

TEST(Doctor, LeavesOutWhatItCouldNotFindOut) {
  Facts facts;
  facts.machine = machine();
  facts.rendezvous = rendezvous_of({{"MASTER_PORT", "0"}});
  facts.probe.failure = "no probe";
  auto sections = examine(facts);
  ASSERT_EQ(sections.size(), 6U);
  EXPECT_THAT(checks_of(sections[0]), testing::ElementsAre("launcher", "secret"));
  EXPECT_THAT(checks_of(sections[1]), testing::ElementsAre("host name"));
  EXPECT_THAT(checks_of(sections[2]), testing::ElementsAre("cores", "threads", "memory", "NUMA", "shared memory",
                                                           "open files", "processes", "locked memory", "clock"));
  EXPECT_THAT(checks_of(sections[3]), testing::ElementsAre("LibTorch"));
  facts.rendezvous = rendezvous_of({{"MASTER_ADDR", "nowhere.invalid"}});
  EXPECT_THAT(checks_of(examine(facts)[1]), testing::ElementsAre("host name", "meeting address"));
  facts.network = between_hosts();
  facts.probe = probe();
  sections = examine(facts);
  EXPECT_THAT(checks_of(sections[1]), testing::ElementsAre("host name", "meeting address", "interface", "port"));
  EXPECT_THAT(checks_of(sections[3]), testing::ElementsAre("LibTorch", "BLAS", "convolutions", "backends"));
}

Section gpu_section(const Facts& facts) {
  return examine(facts)[4];
}

TEST(Doctor, SaysOneNeutralLineWhereNothingSpeaksOfGpus) {
  Facts facts;
  facts.probe = probe();
  facts.probe.has_cuda = true;  // PyTorch's wheel brings it wherever it is installed
  facts.gpus.visible_devices = "";
  facts.nccl_variables = {{"NCCL_SOCKET_IFNAME", "ib0"}};
  EXPECT_EQ(gpu_section(facts).findings, (std::vector<Finding>{{"GPUs", Status::kOk, "none; ranks train on the CPU"}}));
}

TEST(Doctor, SaysOfGpusWhatTheBuildCanDoWithThem) {
  Facts facts;
  facts.gpus = gpus();
  facts.probe = cuda_probe();
  EXPECT_THAT(checks_of(gpu_section(facts)),
              testing::ElementsAre("driver", "GPUs", "NCCL", "compute mode", "NCCL variables"));
  facts.nccl_variables = {{"NCCL_SOCKET_IFNAME", "lo"}};
  EXPECT_THAT(checks_of(gpu_section(facts)), testing::Contains("NCCL's network"));
  facts.probe = probe();
  EXPECT_THAT(checks_of(gpu_section(facts)), testing::ElementsAre("driver", "GPUs", "NCCL"));
  facts.probe = Probe{.failure = "no probe"};
  EXPECT_THAT(checks_of(gpu_section(facts)), testing::ElementsAre("driver", "GPUs"));
  facts.gpus = Gpus{};
  facts.probe = cuda_probe();
  facts.probe.gpus.clear();
  EXPECT_THAT(checks_of(gpu_section(facts)), testing::ElementsAre("driver"));
}

TEST(Doctor, WarnsOfLittleSharedMemoryWhereNcclSharesIt) {
  Facts facts;
  facts.machine = machine();
  facts.machine.shared_memory = Space{64 * kMebibyte, 64 * kMebibyte};
  facts.probe = cuda_probe();
  const auto shared_memory = [&] { return examine(facts)[2].findings[4]; };
  expect_warning(shared_memory(), "too small for NCCL", "--ipc=host");
  facts.nccl_variables = {{"NCCL_SHM_DISABLE", "1"}};
  expect_ok(shared_memory(), "64 MiB");
  facts.nccl_variables.clear();
  facts.probe.gpus.pop_back();
  expect_ok(shared_memory(), "64 MiB");
}

struct Ran {
  int exit_code = -1;
  std::string output;
};

Ran run_command(const std::string& line) {
  CLI::App app("lockstep");
  Ran ran;
  add_doctor(app, ran.exit_code);
  add_env(app, ran.exit_code);
  testing::internal::CaptureStdout();
  app.parse(line);
  ran.output = testing::internal::GetCapturedStdout();
  return ran;
}

bool has_error(const json& findings) {
  return std::any_of(findings.begin(), findings.end(),
                     [](const json& finding) { return finding["status"] == "error"; });
}

json finding_of(const json& findings, const std::string& check) {
  for (const auto& finding : findings)
    if (finding["check"] == check) return finding;
  return nullptr;
}

TEST(DoctorCommand, PrintsJsonAboutThisMachine) {
  TemporaryFolder folder;
  const auto ran = run_command("doctor --json --probe " LOCKSTEP_PROBE " --checkpoint-dir " + folder.path().string());
  const auto findings = json::parse(ran.output);
  EXPECT_GT(findings.size(), 20U);
  for (const auto& finding : findings) {
    EXPECT_EQ(finding.size(), 4U) << finding;
    for (const auto* member : {"check", "status", "found", "remedy"}) EXPECT_TRUE(finding.contains(member)) << finding;
    EXPECT_NE(finding["found"], "") << finding;
    EXPECT_TRUE(finding["status"] == "ok" || finding["remedy"] != "") << finding;
  }
  EXPECT_EQ(finding_of(findings, "LibTorch")["status"], "ok");
  EXPECT_EQ(finding_of(findings, "checkpoints")["status"], "ok");
  EXPECT_EQ(ran.exit_code, has_error(findings) ? 1 : 0);
}

TEST(DoctorCommand, AsksTheNvidiaSmiThatIsFirstInPath) {
  TemporaryFolder folder;
  make_script(folder, "nvidia-smi", "echo '0, NVIDIA T4, 00000000:00:1E.0, 15360 MiB, 550.54.15, Default'");
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", (folder.path().string() + ":" + path).c_str(), 1);
  const auto ran = run_command("doctor --json --probe /nowhere");
  ::setenv("PATH", path.c_str(), 1);
  const auto findings = json::parse(ran.output);
  EXPECT_EQ(finding_of(findings, "driver")["found"], "550.54.15");
  EXPECT_THAT(finding_of(findings, "GPUs")["found"], HasSubstr("1 x NVIDIA T4, 15 GiB"));
}

TEST(DoctorCommand, EndsWithOneWhenSomethingIsWrong) {
  const auto ran = run_command("doctor --json --checkpoint-dir /nowhere --probe " LOCKSTEP_PROBE);
  EXPECT_EQ(ran.exit_code, 1);
  EXPECT_EQ(finding_of(json::parse(ran.output), "checkpoints")["found"],
            "/nowhere cannot be written: No such file or directory");
}

TEST(DoctorCommand, QuotesVariablesThatAreNoUtf8) {
  ::setenv("LOCKSTEP_INIT_METHOD", "\xff", 1);
  const auto ran = run_command("doctor --json --probe /nowhere");
  ::unsetenv("LOCKSTEP_INIT_METHOD");
  EXPECT_EQ(finding_of(json::parse(ran.output), "launcher")["found"],
            "LOCKSTEP_INIT_METHOD is \"\ufffd\": it must be file:///path or tcp://host:port");
}

TEST(DoctorCommand, PrintsATableThatEndsWithTheCounts) {
  const auto ran = run_command("doctor --probe /nowhere");
  EXPECT_EQ(ran.exit_code, 1);
  EXPECT_THAT(ran.output, HasSubstr("the probe failed: /nowhere could not be started"));
  EXPECT_THAT(ran.output, testing::ContainsRegex("[0-9]+ ok, [0-9]+ warnings?, [1-9] errors?\n$"));
  EXPECT_THAT(ran.output, Not(HasSubstr("\033")));
}

TEST(EnvReport, ShowsTheVariablesThatMatterAndNoSecrets) {
  const Variables shown = relevant_variables({{"RANK", "1"},
                                              {"PATH", "/bin"},
                                              {"LOCKSTEP_SECRET_FILE", "/job.secret"},
                                              {"LOCKSTEP_API_TOKEN", "t"},
                                              {"SLURM_JWT", "j"},
                                              {"OMPI_secret_word", "s"},
                                              {"NCCL_MY_KEY", "k"},
                                              {"PMI_PASSWORD", "p"},
                                              {"NCCL_DEBUG", "INFO"},
                                              {"AWS_SECRET_ACCESS_KEY", "a"}});
  const Variables expected{{"RANK", "1"},
                           {"LOCKSTEP_SECRET_FILE", "/job.secret"},
                           {"LOCKSTEP_API_TOKEN", "(hidden)"},
                           {"SLURM_JWT", "(hidden)"},
                           {"OMPI_secret_word", "(hidden)"},
                           {"NCCL_MY_KEY", "(hidden)"},
                           {"PMI_PASSWORD", "(hidden)"},
                           {"NCCL_DEBUG", "INFO"}};
  EXPECT_EQ(shown, expected);
}

TEST(EnvReport, KeepsEveryVariableOnOneLine) {
  const auto text = to_text(describe("host", machine(), probe(), {{"LOCKSTEP_JOB_ID", "a\nb\033[31m"}}));
  EXPECT_THAT(text, HasSubstr("LOCKSTEP_JOB_ID  a?b?[31m\n"));
  EXPECT_THAT(text, HasSubstr("\n  GPUs             none\n"));
}

TEST(EnvCommand, PrintsAReportAsTextAndAsJson) {
  ::setenv("LOCKSTEP_JOB_ID", "\xff", 1);  // no UTF-8
  const auto printed = run_command("env --json --probe " LOCKSTEP_PROBE);
  ::unsetenv("LOCKSTEP_JOB_ID");
  EXPECT_EQ(printed.exit_code, 0);
  const auto report = json::parse(printed.output);
  EXPECT_EQ(report["lockstep"]["version"], LOCKSTEP_VERSION_STRING);
  EXPECT_EQ(report["variables"]["LOCKSTEP_JOB_ID"], "\ufffd");
  EXPECT_NE(report["LibTorch"]["version"], "");
  for (const auto* section : {"machine", "cgroup limits"}) EXPECT_FALSE(report[section].empty()) << section;

  const auto text = run_command("env --probe /nowhere");
  EXPECT_EQ(text.exit_code, 0);
  EXPECT_THAT(text.output, HasSubstr("could not be asked"));
  EXPECT_THAT(text.output, HasSubstr("kernel"));
}

}  // namespace
}  // namespace lockstep::tool
