#include "bench/run_bench.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>
#include <lockstep/launcher.h>
#include <lockstep/version.h>

#include "bench/coprocess.h"
#include "bench/gpu_report.h"
#include "bench/launch_ranks.h"
#include "bench/operation.h"
#include "bench/report_format.h"
#include "bench/request.h"
#include "run/child_process.h"

namespace lockstep::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kCheckedSteps = 20;  // from the initial weights
constexpr int kMinSteps = 10;      // in a sample: when a sample starts, the GPU is idle, unlike in training
constexpr int kWarmUps = 2;        // rounds that are not counted
constexpr int kWarmUpShare = 5;    // steps / 5 untimed steps precede each sample: the process was idle before
constexpr int kMinGpuRounds = 5, kMaxRounds = 101;
constexpr Seconds kAllModels{60};  // time for all rounds of all models
constexpr Seconds kSample{0.1};    // minimum duration of a sample

/// A process that trains models on the GPU: lockstep-bench or gpu_trainer.py.
class Trainer {
 public:
  Trainer(GpuSide side, std::vector<std::string> command) : side_(side), process_(name_of(side), std::move(command)) {}

  GpuSide side() const { return side_; }

  /// Blocks until the process has initialized the GPU; returns the version of its torch. All functions throw PeerError
  /// if the process has ended.
  std::string await_ready() { return process_.read_answer(); }
  /// Creates the model with its initial weights and resets the peak memory. `file` is the compiled model, for the sides
  /// that train it.
  void load_model(const std::string& model, const std::string& file) {
    process_.request("model " + model + " " + file);
  }
  /// Trains and blocks until the GPU is done; returns the loss of the last step.
  double train(int steps) { return std::stod(process_.request("train " + std::to_string(steps))); }
  /// The peak memory of this model.
  int64_t peak_bytes() { return std::stoll(process_.request("peak")); }
  /// Frees the model's memory.
  void unload_model() { process_.request("drop"); }

 private:
  const GpuSide side_;
  Coprocess process_;
};

std::vector<std::string> query_gpus(const std::string& program) {
  const auto answer = tool::run_program({program, "--gpus"}, std::chrono::seconds(60));
  if (!answer.failure.empty()) throw SystemError(fmt::format("{} {}", program, answer.failure));
  return nlohmann::json::parse(answer.output);
}

Seconds time_of(Trainer& trainer, int steps) {
  const auto begin = Clock::now();
  trainer.train(steps);
  return Clock::now() - begin;
}

class GpuMeasurement {
 public:
  /// `compile` makes the file of a model, and may be empty.
  GpuMeasurement(const GpuPlan& plan, std::string gpu, std::deque<Trainer>& trainers,
                 std::function<std::string(const std::string& model)> compile)
      : plan_(plan), gpu_(std::move(gpu)), trainers_(trainers), compile_(std::move(compile)) {}

  GpuRow measure_model(const std::string& model) {
    GpuRow row{.model = model, .gpu = gpu_, .is_checked = plan_.check};
    std::string file;
    if (compile_) {
      const auto begin = Clock::now();
      file = compile_(model);
      row.export_seconds = Seconds(Clock::now() - begin).count();
    }
    for (auto& trainer : trainers_) {
      trainer.load_model(model, file);
      row.samples.push_back({.side = trainer.side(), .loss = trainer.train(kCheckedSteps)});
    }
    row.steps = std::max(kMinSteps,
                         static_cast<int>(std::ceil(kCheckedSteps * (kSample / time_of(trainers_[0], kCheckedSteps)))));
    take_rounds(row);
    for (size_t i = 0; i < trainers_.size(); ++i) {
      row.samples[i].peak_bytes = trainers_[i].peak_bytes();
      trainers_[i].unload_model();
    }
    return row;
  }

 private:
  /// Measures the sides in turn, so that all sides are measured in the same state of the machine.
  void take_rounds(GpuRow& row) {
    Clock::time_point begin;
    for (int round = 0; round < kWarmUps; ++round) {
      begin = Clock::now();
      take_round(row);
    }
    const Seconds limit = kAllModels / static_cast<double>(plan_.models.size());
    const int fitting = std::clamp(static_cast<int>(limit / (Clock::now() - begin)), kMinGpuRounds, kMaxRounds);
    for (auto& sample : row.samples) sample.times_us.clear();
    for (int round = 0; round < (plan_.rounds > 0 ? plan_.rounds : fitting); ++round) take_round(row);
  }

  void take_round(GpuRow& row) {
    for (size_t i = 0; i < trainers_.size(); ++i) {
      trainers_[i].train(row.steps / kWarmUpShare);
      row.samples[i].times_us.push_back(
          std::chrono::duration<double, std::micro>(time_of(trainers_[i], row.steps)).count() / row.steps);
    }
  }

  const GpuPlan& plan_;
  const std::string gpu_;
  std::deque<Trainer>& trainers_;
  const std::function<std::string(const std::string& model)> compile_;
};

/// Compiles models into a temporary folder, by the script of `lockstep compile`.
class ModelCompiler {
 public:
  explicit ModelCompiler(std::string python) : python_(std::move(python)) {
    std::string name = "/tmp/lockstep-bench-XXXXXX";
    if (!::mkdtemp(name.data()))
      throw SystemError(fmt::format("cannot create a folder in /tmp: {}", std::strerror(errno)));
    folder_ = name;
  }
  ~ModelCompiler() {
    for (const auto& file : files_) ::unlink(file.c_str());
    ::rmdir(folder_.c_str());
  }
  ModelCompiler(const ModelCompiler&) = delete;
  ModelCompiler& operator=(const ModelCompiler&) = delete;

  std::string compile(const std::string& model) {
    const auto script = tool::find_helper_program("compile_model.py").string();
    const auto models = tool::find_helper_program("gpu_trainer.py").string();
    auto function = "make_" + model;
    std::replace(function.begin(), function.end(), '-', '_');
    const auto file = folder_ + "/" + model + ".pt2";
    std::vector<std::string> command{"/usr/bin/env", python_, script,        models + ":" + function,
                                     "-o",           file,    "--precision", "high"};
    if (model.starts_with("gpt")) command.insert(command.end(), {"--autocast", "bfloat16"});
    const auto answer = tool::run_program(command, kLongestCompilation);
    if (!answer.failure.empty()) throw SystemError(fmt::format("lockstep compile of {} {}", model, answer.failure));
    files_.push_back(file);
    return file;
  }

 private:
  static constexpr std::chrono::minutes kLongestCompilation{30};

  const std::string python_;
  std::string folder_;
  std::vector<std::string> files_;
};

GpuSide side_of_mode(const std::string& mode) {
  return mode == "default"           ? GpuSide::kPythonCompile
         : mode == "reduce-overhead" ? GpuSide::kPythonReduceOverhead
                                     : GpuSide::kPythonMaxAutotune;
}

std::deque<Trainer> start_trainers(const std::string& program, const std::optional<Python>& python,
                                   const std::vector<std::string>& compile_modes) {
  std::deque<Trainer> trainers;
  trainers.emplace_back(GpuSide::kPlain, std::vector<std::string>{program, "--gpu", "plain"});
  trainers.emplace_back(GpuSide::kDdp, std::vector<std::string>{program, "--gpu", "ddp"});
  trainers.emplace_back(GpuSide::kCaptured, std::vector<std::string>{program, "--gpu", "captured"});
  if (!compile_modes.empty()) {
    trainers.emplace_back(GpuSide::kCompiled, std::vector<std::string>{program, "--gpu", "compiled"});
    trainers.emplace_back(GpuSide::kCompiledCaptured, std::vector<std::string>{program, "--gpu", "compiled-captured"});
  }
  if (python) {
    const auto script = tool::find_helper_program("gpu_trainer.py").string();
    if (script.empty()) throw SystemError("gpu_trainer.py is neither beside lockstep nor in ../libexec/lockstep");
    const auto start = [&](GpuSide side, const char* name) {
      trainers.emplace_back(side, std::vector<std::string>{python->program, script, name});
    };
    start(GpuSide::kPythonPlain, "plain");
    start(GpuSide::kPythonGraph, "graph");
    start(GpuSide::kPythonDdp, "ddp");
    start(GpuSide::kPythonBest, "best");
    for (const auto& mode : compile_modes) start(side_of_mode(mode), mode.c_str());
  }
  return trainers;
}

void print_conditions(const std::string& gpu, const std::string& libtorch, const std::optional<Python>& python) {
  std::cout << fmt::format("# lockstep {} bench {}: one rank on {}; LibTorch {}; AdamW, fused\n",
                           LOCKSTEP_VERSION_STRING, kGpu, gpu, libtorch);
  if (python)
    std::cout << fmt::format(
        "# python: PyTorch {} of {}; best: gradient_as_bucket_view, static_graph, no buffer broadcast\n", python->torch,
        python->program);
  std::cout << gpu_header() << std::flush;
}

void print_verdict(const GpuPlan& plan, const std::vector<GpuRow>& rows, bool is_wrong) {
  const auto [fewest, most] = std::minmax_element(
      rows.begin(), rows.end(), [](const GpuRow& a, const GpuRow& b) { return a.rounds() < b.rounds(); });
  const char* verdict = !plan.check ? "losses not compared" : is_wrong ? "SOME LOSSES ARE WRONG" : "all losses agree";
  std::cout << fmt::format("# {} rounds per model; {}\n", range(fewest->rounds(), most->rounds()), verdict)
            << gpu_comparison(rows) << std::flush;
}

}  // namespace

int run_gpu_bench(const BenchArguments& arguments) {
  if (!arguments.plot_file.empty()) throw UsageError("--plot draws time over size, but gpu has no sizes: remove it");
  const auto program = find_bench_program();
  const auto gpus = query_gpus(program);
  const auto plan = make_gpu_plan(arguments.request, gpus);
  std::optional<Python> python;
  if (!arguments.request.against.empty()) python = find_python("NCCL", arguments.request.python);
  ::setenv("OMP_NUM_THREADS", std::to_string(arguments.threads).c_str(), 1);
  for (int stop : {SIGINT, SIGTERM})  // the trainers end with this process
    ::signal(stop, [](int) { ::_exit(static_cast<int>(LaunchExit::kPreempted)); });
  std::optional<ModelCompiler> compiler;
  if (!plan.compile_modes.empty()) compiler.emplace(python->program);
  auto trainers = start_trainers(program, python, plan.compile_modes);
  std::string libtorch;
  for (auto& trainer : trainers) {
    const auto version = trainer.await_ready();
    if (trainer.side() == GpuSide::kPlain) libtorch = version;
  }
  if (!arguments.json) print_conditions(gpus[0], libtorch, python);

  std::function<std::string(const std::string&)> compile;
  if (compiler) compile = [&](const std::string& model) { return compiler->compile(model); };
  GpuMeasurement measurement(plan, gpus[0], trainers, compile);
  std::vector<GpuRow> rows;
  for (const auto& model : plan.models) {
    rows.push_back(measurement.measure_model(model));
    std::cout << (arguments.json ? to_json_line(rows.back()) + "\n" : gpu_lines(rows.back())) << std::flush;
  }
  const bool is_wrong =
      plan.check && std::any_of(rows.begin(), rows.end(), [](const GpuRow& row) { return row.wrong() != 0; });
  if (!arguments.json) print_verdict(plan, rows, is_wrong);
  return is_wrong ? kWrongResults : 0;
}

}  // namespace lockstep::bench
