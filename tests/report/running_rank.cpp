// A rank that trains a small network with a TrainingRun.
//
//   test_ranks running_rank train FOLDER EPOCHS STEPS
//
// Saves every STEPS steps, besides after each epoch. Prints "step N" after each step and, when the run is complete,
// "weights SUM", where SUM stands for all bits of the weights. Exits with the run's exit code.
//
//   test_ranks running_rank many_steps FOLDER STEPS
//
// Takes many small steps. Prints "used RESIDENT_BYTES DESCRIPTORS THREADS" ten times. Ends when it reads a line.
//
//   test_ranks running_rank watched FOLDER [slow RANK | throw RANK | nan RANK | off | quick]
//
// Takes steps of a few milliseconds until the run is stopped by a signal, for tests of the live files. One rank may be
// slow, or throw in step 20, or log NaN in step 20, which stops the run. "off": without live files. "quick": ends after
// 5 steps. Prints "ready" after 3 steps.

#include <dirent.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <string>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "ranks/test_ranks.h"

namespace {

using namespace lockstep;

/// Samples with noise from the generator that the loader seeds for each of them.
struct NoisySamples {
  size_t size() const { return 120; }
  torch::data::Example<> get(size_t index, at::Generator& random) const {
    auto data = torch::sin(torch::arange(8.0) * static_cast<double>(index + 1));
    data += 0.1 * torch::randn({8}, random);
    return {data, torch::tensor(static_cast<int64_t>(index % 3))};
  }
};

struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl() {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
  }
  torch::Tensor forward(torch::Tensor x) {
    return last(torch::dropout(torch::relu(norm(first(x))), 0.3, is_training()));
  }
  torch::nn::Linear first{8, 16};
  torch::nn::BatchNorm1d norm{16};
  torch::nn::Linear last{16, 3};
};
TORCH_MODULE(SmallNet);

int train_as_a_run(const ProcessGroup& world, const std::string& folder, int64_t epochs, int64_t save_every_steps) {
  torch::manual_seed(1 + world.rank());
  SmallNet net;
  net->to(world.device());
  convert_sync_batchnorm(*net, world);
  DistributedDataParallel ddp(net, world);
  FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(0.01));
  LRScheduler scheduler(
      optimizer,
      schedules::one_cycle({.max_lr = 0.05, .total_steps = epochs * static_cast<int64_t>(120 / 4 / world.size())}));
  DistributedSampler sampler(120, world, {.seed = 3});
  DataLoader<NoisySamples> loader(NoisySamples(), sampler,
                                  {.batch_size = 4, .num_workers = 1, .device = world.device()});

  auto state = TrainingState{}.add("model", net).add("optimizer", optimizer).add("scheduler", scheduler);
  TrainingRun run(world, folder, state,
                  {.best = "loss",
                   .best_mode = MetricMode::kMin,
                   .save_every_steps = save_every_steps,
                   .metrics = {.every = 4},
                   .optimizer = &optimizer});
  while (run.next_epoch(epochs)) {
    for (auto& batch : run.batches(loader)) {
      run.step([&] {
        optimizer.zero_grad();
        auto loss = torch::nn::functional::cross_entropy(ddp(batch.data), batch.target);
        loss.backward();
        optimizer.step();
        scheduler.step();
        run.log("loss", loss);
      });
      std::cout << "step " << run.steps() << std::endl;
    }
    run.log("norm", [&] { return net->first->weight.norm(); });
  }
  if (!run.is_stopping() && world.rank() == 0) {
    auto flat = torch::nn::utils::parameters_to_vector(net->parameters()).cpu().contiguous();
    uint64_t sum = 14695981039346656037u;
    for (int64_t i = 0; i < flat.numel(); ++i)
      sum = (sum ^ reinterpret_cast<const uint32_t*>(flat.data_ptr<float>())[i]) * 1099511628211u;
    std::cout << "weights " << sum << std::endl;
  }
  return run.exit_code();
}

int64_t entries_in(const char* folder) {
  DIR* directory = ::opendir(folder);
  int64_t count = 0;
  while (::readdir(directory)) ++count;
  ::closedir(directory);
  return count;
}

int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

int take_many_steps(const ProcessGroup& world, const std::string& folder, int64_t steps) {
  torch::manual_seed(1);
  torch::nn::Linear net(8, 4);
  DistributedDataParallel ddp(net, world);
  FusedAdamW optimizer(ddp.parameters(), 0.001);
  const auto input = torch::randn({4, 8});
  const auto state = TrainingState{}.add("model", net).add("optimizer", optimizer);
  const int64_t part = steps / 10;
  TrainingRun run(world, folder, state,
                  {.save_every_steps = part / 20, .metrics = {.every = 5}, .optimizer = &optimizer});
  while (run.next_epoch(10)) {
    for (int64_t i = 0; i < part; ++i)
      run.step([&] {
        optimizer.zero_grad();
        auto loss = ddp(input).square().mean();
        loss.backward();
        optimizer.step();
        run.log("loss", loss);
        run.log("largest", loss, MetricReduction::kMax);
      });
    run.log("accuracy", 0.5);
    run.checkpoints().wait();  // its thread and its file are not leaks
    std::cout << "used " << resident_bytes() << " " << entries_in("/proc/self/fd") << " "
              << entries_in("/proc/self/task") << std::endl;
  }
  std::cin.get();
  return run.exit_code();
}

int take_watched_steps(const ProcessGroup& world, const std::vector<std::string>& words) {
  const std::string way = words.size() > 2 ? words[2] : "";
  const bool is_chosen = words.size() > 3 && std::stoi(words[3]) == world.rank();
  torch::manual_seed(1);
  torch::nn::Linear net(8, 4);
  DistributedDataParallel ddp(net, world);
  FusedAdamW optimizer(ddp.parameters(), 0.001);
  const std::vector<torch::Tensor> batches(way == "quick" ? 5 : 1'000'000, torch::ones({4, 8}));
  const auto state = TrainingState{}.add("model", net).add("optimizer", optimizer);
  TrainingRun run(world, words.at(1), state,
                  {.stop_on_nan = way == "nan",
                   .progress = {.output = ProgressOptions::Output::kOff},
                   .settings = {{"lr", 0.001}, {"batch_size", 4}, {"model", "linear"}, {"amp", false}, {"seed", 1u}},
                   .live = way != "off"});
  while (run.next_epoch(1))
    for (auto& batch : run.batches(batches)) {
      run.step([&] {
        optimizer.zero_grad();
        auto loss = ddp(batch).square().mean();
        if (way == "slow" && is_chosen) ::usleep(50'000);  // computes longer than the others
        if (way == "throw" && is_chosen && run.steps() == 20) throw std::runtime_error("no such sample");
        loss.backward();
        optimizer.step();
        run.log("loss", way == "nan" && is_chosen && run.steps() == 19 ? loss * NAN : loss);
      });
      if (run.steps() == 3) std::cout << "ready" << std::endl;
      if (run.steps() == 3) std::cerr << "warning of rank " << world.rank() << std::endl;
    }
  return run.exit_code();
}

}  // namespace

int run_running_rank(const std::vector<std::string>& words) {
  torch::set_num_threads(1);
  const auto world = init_process_group({.device = torch::kCPU});
  if (words.at(0) == "many_steps") return take_many_steps(world, words.at(1), std::stoll(words.at(2)));
  if (words.at(0) == "watched") return take_watched_steps(world, words);
  return train_as_a_run(world, words.at(1), std::stoll(words.at(2)), std::stoll(words.at(3)));
}
