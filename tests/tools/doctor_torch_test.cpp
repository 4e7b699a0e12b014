#include "doctor/checks.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "run/child_process.h"
#include "support/temporary_folder.h"
#include "tools/doctor_facts.h"
#include "tools/script.h"

namespace lockstep::tool {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

TEST(Doctor, JudgesLibTorch) {
  auto some = probe();
  expect_ok(check_torch(some), "2.4.0, from a Python wheel: /opt/venv");
  some.torch_library = "/usr/lib/aarch64-linux-gnu/libtorch_cpu.so.1.13";
  expect_ok(check_torch(some), "from the distribution");
  some.torch_library = "/opt/libtorch/lib/libtorch_cpu.so";
  expect_ok(check_torch(some), "installed manually");
  some.lockstep_version = "0.0.1";
  expect_error(check_torch(some), "/opt/lockstep-probe belongs to lockstep 0.0.1, but this is " LOCKSTEP_VERSION_STRING,
               "from one build");
  some.failure = "/opt/lockstep-probe ended with exit code 127";
  expect_error(check_torch(some), "the probe failed: /opt/lockstep-probe ended with exit code 127", "ldd");
  some.program = "";
  expect_error(check_torch(some), "the probe failed", "--probe");
}

TEST(Doctor, JudgesTheBlas) {
  auto some = probe();
  auto arm = machine();
  arm.architecture = "aarch64";
  expect_ok(check_blas(some, arm), "MKL, built into LibTorch");
  some.has_mkl = false;
  expect_ok(check_blas(some, arm), "built into LibTorch");
  some.blas_libraries = {"/usr/lib/a/openblas-pthread/libblas.so.3", "/usr/lib/a/openblas-pthread/libopenblasp.so"};
  EXPECT_EQ(check_blas(some, arm), (Finding{"BLAS", Status::kOk, "/usr/lib/a/openblas-pthread/libopenblasp.so"}));
  some.blas_libraries = {"/usr/lib/a/openblas-serial/libopenblas.so"};
  expect_warning(check_blas(some, arm), "without threads", "libopenblas0-pthread");
  some.blas_libraries = {"/usr/lib/a/blas/libblas.so.3.11.0"};
  expect_warning(check_blas(some, arm), "the reference BLAS", "--config libblas.so.3-aarch64-linux-gnu");
  some.blas_libraries = {"/opt/intel/libmkl_core.so.2"};
  expect_ok(check_blas(some, arm), "/opt/intel/libmkl_core.so.2");
}

TEST(Doctor, JudgesConvolutionsByTheirTimes) {
  auto some = probe();
  auto arm = machine();
  arm.architecture = "aarch64";
  expect_ok(check_convolutions(some, arm), "without MKL-DNN");
  some.has_mkldnn = true;
  some.convolution_ms = 4;
  expect_ok(check_convolutions(some, arm), "MKL-DNN is off");
  some.uses_mkldnn = true;
  some.convolution_without_mkldnn_ms = 3;
  expect_ok(check_convolutions(some, arm), "4.0 ms with MKL-DNN, 3.0 ms without");
  some.convolution_ms = 12;
  expect_warning(check_convolutions(some, arm), "12.0 ms with MKL-DNN", "setUserEnabledMkldnn(false)");
  some.torch_version = "1.13.0";
  expect_warning(check_convolutions(some, arm), "12.0 ms with MKL-DNN", "lockstep::prefer_fast_convolutions()");
  expect_warning(check_convolutions(some, machine()), "12.0 ms with MKL-DNN", "setUserEnabledMkldnn(false)");
}

TEST(Doctor, JudgesTheBackends) {
  auto some = probe();
  EXPECT_EQ(check_backends(some), (Finding{"backends", Status::kOk, "gloo, threads",
                                           "apt-get install libopenmpi-dev for mpi, then rebuild lockstep"}));
  some.backends = {"mpi", "nccl", "threads"};
  expect_warning(check_backends(some), "gloo, the backend for CPUs, is missing",
                 "apt-get install libgloo-dev for gloo, then rebuild lockstep");
  some.backends = {"gloo", "mpi", "threads"};
  EXPECT_EQ(check_backends(some), (Finding{"backends", Status::kOk, "gloo, mpi, threads"}));
  some.backends = {"threads"};
  expect_error(check_backends(some), "none of them connects processes", "libgloo-dev");
}

TEST(RunProgram, ReturnsWhatWasPrinted) {
  const auto ran = run_program({"/bin/sh", "-c", "cat; echo out; echo err >&2"}, 10s);
  EXPECT_EQ(ran.output, "out\n");
  EXPECT_EQ(ran.failure, "");
}

TEST(RunProgram, SaysHowAProgramFailed) {
  EXPECT_EQ(run_program({"/nowhere"}, 10s).failure, "could not be started: No such file or directory");
  EXPECT_EQ(run_program({"/bin/sh", "-c", "echo first >&2; echo last >&2; exit 3"}, 10s).failure,
            "ended with exit code 3: last");
  EXPECT_EQ(run_program({"/bin/sh", "-c", "kill -11 $$"}, 10s).failure, "was killed by SIGSEGV (Segmentation fault)");
}

TEST(RunProgram, KillsWhatTakesTooLong) {
  for (const auto* script : {"sleep 30", "sleep 30 & sleep 30", "exec >&- 2>&-; sleep 30"}) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(run_program({"/bin/sh", "-c", script}, 200ms).failure, "did not end within 0.2 s") << script;
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s) << script;
  }
}

TEST(Probe, QuotesWhatIsNoAnswer) {
  EXPECT_THAT(parse_probe("hello\nworld").failure, HasSubstr("printed \"hello\""));
  EXPECT_THAT(parse_probe("{}").failure, HasSubstr("'lockstep' not found"));
  EXPECT_THAT(parse_probe("[]").failure, HasSubstr("printed \"[]\""));
}

TEST(Probe, NamesTheProgramThatFailed) {
  TemporaryFolder folder;
  const auto script = make_script(folder, "script", "echo 'libtorch.so: cannot open' >&2; exit 127");
  const auto asked = run_probe(script);
  EXPECT_EQ(asked.failure, script + " ended with exit code 127: libtorch.so: cannot open");
  EXPECT_EQ(asked.program, script);
  EXPECT_EQ(run_probe(make_script(folder, "script", "sleep 30"), 100ms).failure, script + " did not end within 0.1 s");
  const auto missing = run_probe("");  // not beside the tests
  EXPECT_THAT(missing.failure, HasSubstr("neither beside lockstep nor in ../libexec/lockstep"));
}

TEST(Probe, AnswersForThisBuildOfLibTorch) {
  const auto asked = run_probe(LOCKSTEP_PROBE);
  EXPECT_EQ(asked.failure, "");
  EXPECT_EQ(asked.lockstep_version, LOCKSTEP_VERSION_STRING);
  EXPECT_TRUE(std::filesystem::exists(asked.torch_library)) << asked.torch_library;
  EXPECT_GE(asked.threads, 1);
  EXPECT_GT(asked.convolution_ms.value_or(0), 0);
  EXPECT_THAT(asked.backends, testing::Contains("threads"));
}

}  // namespace
}  // namespace lockstep::tool
