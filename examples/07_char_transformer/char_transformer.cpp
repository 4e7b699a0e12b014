// A small transformer that predicts the next character of a text, trained by all ranks. At the end it writes a text of
// its own.
//
//   lockstep run -n 2 build/char_transformer [STEPS [FILE]]
//
// The default text is the GNU General Public License, which is on every Debian.

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kContext = 64, kWidth = 64, kHeads = 4, kLayers = 2;
constexpr int64_t kAlphabet = 256;  // a character is a byte

/// All windows of a text. The target of each character is the next one.
struct Windows {
  Tensor text;

  size_t size() const { return static_cast<size_t>(text.size(0) - kContext); }
  torch::data::Example<> get(size_t index) const {
    const auto window = text.narrow(0, static_cast<int64_t>(index), kContext + 1);
    return {window.slice(0, 0, -1), window.slice(0, 1)};
  }
};

struct TransformerImpl : nn::Module {
  TransformerImpl() {
    const auto layer = nn::TransformerEncoderLayerOptions(kWidth, kHeads).dim_feedforward(4 * kWidth).dropout(0);
    character = register_module("character", nn::Embedding(kAlphabet, kWidth));
    position = register_module("position", nn::Embedding(kContext, kWidth));
    encoder = register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, kLayers)));
    output = register_module("output", nn::Linear(kWidth, kAlphabet));
  }
  /// Takes [texts, characters]. Returns logits of the next character: [texts, characters, alphabet].
  Tensor forward(const Tensor& characters) {
    const auto length = characters.size(1);
    const auto positions = torch::arange(length, characters.options());
    const auto embedded = (character(characters) + position(positions)).transpose(0, 1);
    const auto mask = torch::full({length, length}, -INFINITY, embedded.options()).triu(1);  // hides later characters
    return output(encoder(embedded, mask)).transpose(0, 1);
  }
  nn::Embedding character{nullptr}, position{nullptr};
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear output{nullptr};
};
TORCH_MODULE(Transformer);

/// Continues a text, of shape [1, characters]: draws each character from the network's prediction.
std::string write(Transformer& net, Tensor text, size_t length) {
  torch::NoGradGuard no_grad;
  std::string written;
  while (written.size() < length) {
    const auto logits = net(text.slice(1, -kContext)).select(1, -1);
    text = torch::cat({text, logits.softmax(1).multinomial(1)}, 1);
    const auto next = text[0][-1].item<int64_t>();
    written += next == '\n' || next >= ' ' ? static_cast<char>(next) : '?';  // no control characters
  }
  return written;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 500;
  const std::string file = argc > 2 ? argv[2] : "/usr/share/common-licenses/GPL-3";
  std::ifstream stream(file, std::ios::binary);
  const std::vector<uint8_t> bytes(std::istreambuf_iterator<char>(stream), {});
  if (steps < 1 || bytes.size() <= kContext) {
    std::cerr << "usage: char_transformer [STEPS [FILE]]\n" << file << " has " << bytes.size() << " characters\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  lockstep::seed_everything(1);
  Transformer net;
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(3e-3));
  const Windows windows{torch::tensor(bytes).to(torch::kLong)};
  lockstep::DistributedSampler sampler(windows, world, {.seed = 1});  // different windows on each rank
  lockstep::DataLoader loader(windows, sampler, {.batch_size = 16, .device = world.device()});

  lockstep::MeanMetric loss(world.device());
  for (int64_t epoch = 0, step = 0; step < steps; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      const auto logits = ddp(batch.data);
      const auto batch_loss = nn::functional::cross_entropy(logits.flatten(0, 1), batch.target.flatten());
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
  if (world.rank() != 0) return 0;
  const auto first = windows.text.slice(0, 0, kContext).unsqueeze(0).to(world.device());
  std::cout << "The network writes:\n" << write(net, first, 300) << std::endl;
}
