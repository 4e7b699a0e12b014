// A model that is written and compiled in Python, and trained in C++ by all ranks. It predicts the next character of a
// text; the last tenth of the text is for evaluation.
//
//   lockstep compile model.py:make -o model.pt2
//   lockstep run -n 2 build/compiled model.pt2 [STEPS [FILE]]
//
// At the end it writes trained.pt, a state_dict that the model in Python loads. Needs LibTorch 2.11 or later.

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>

namespace {

using torch::Tensor;

/// All windows of a text. The target of each character is the next one.
struct Windows {
  Tensor text;
  int64_t context;

  size_t size() const { return static_cast<size_t>(text.size(0) - context); }
  torch::data::Example<> get(size_t index) const {
    const auto window = text.narrow(0, static_cast<int64_t>(index), context + 1);
    return {window.slice(0, 0, -1), window.slice(0, 1)};
  }
};

/// Returns the mean loss of the model over a text. In evaluation mode, the compiled model returns its logits.
double evaluate(lockstep::CompiledModule& net, const Windows& windows, int64_t batch,
                const lockstep::ProcessGroup& world) {
  net->eval();
  lockstep::DistributedSampler sampler(windows, world, {.shuffle = true, .seed = 2});
  lockstep::DataLoader loader(windows, sampler, {.batch_size = batch, .drop_last = true, .device = world.device()});
  lockstep::MeanMetric loss(world.device());
  int64_t batches = 0;
  for (auto& windows_of_batch : loader) {
    const auto logits = net(windows_of_batch.data).toTensor();
    loss.add(torch::nn::functional::cross_entropy(logits.flatten(0, 1), windows_of_batch.target.flatten()));
    if (++batches == 10) break;
  }
  net->train();
  return loss.compute(world);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 2 ? std::atoll(argv[2]) : 500;
  const std::string file = argc > 3 ? argv[3] : "/usr/share/common-licenses/GPL-3";
  std::ifstream stream(file, std::ios::binary);
  const std::vector<uint8_t> bytes(std::istreambuf_iterator<char>(stream), {});
  if (argc < 2 || steps < 1 || bytes.empty()) {
    std::cerr << "usage: compiled MODEL.pt2 [STEPS [FILE]]\n" << file << " has " << bytes.size() << " characters\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  lockstep::CompiledModule net(argv[1], world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(3e-3));

  // Graphs are compiled for fixed sizes: each batch is as large as the model's example, and no batch is smaller.
  const auto sizes = net->inputs()[0][0].sizes;  // [batch, context]
  const auto text = torch::tensor(bytes).to(torch::kLong);
  const int64_t trained = text.size(0) * 9 / 10;
  const Windows windows{text.slice(0, 0, trained), sizes[1]}, unseen{text.slice(0, trained), sizes[1]};
  lockstep::DistributedSampler sampler(windows, world, {.seed = 1});
  lockstep::DataLoader loader(windows, sampler, {.batch_size = sizes[0], .drop_last = true, .device = world.device()});

  lockstep::MeanMetric loss(world.device());
  for (int64_t epoch = 0, step = 0; step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      const auto batch_loss = ddp(batch.data, batch.target).toTensor();  // compiled with its loss
      batch_loss.backward();
      optimizer.step();
      loss.add(batch_loss.detach());
      if (++step == 1 || step % 50 == 0 || step == steps) {
        const double mean = loss.compute(world);  // collective
        lockstep::print(world, "step ", step, "  loss ", mean);
        loss.reset();
      }
      if (step == steps) break;
    }
  }
  lockstep::print(world, "loss on unseen text ", evaluate(net, unseen, sizes[0], world));
  if (world.rank() == 0) lockstep::save_checkpoint("trained.pt", lockstep::state_dict(*net));
}
