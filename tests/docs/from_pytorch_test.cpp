// The right column of the table of docs/from_pytorch.md. Its code is compiled, not run: the objects that it uses are
// declared only.

#include <torch/script.h>

#include "fragments.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused"

namespace from_pytorch {

using namespace std::chrono_literals;
namespace schedules = lockstep::schedules;

extern lockstep::ProcessGroup world, g, group;
extern lockstep::Work work;
extern std::function<void(std::exception_ptr)> callback;
extern std::vector<lockstep::Message> messages;
extern lockstep::TcpStore store;
extern torch::IValue obj;
extern double x;
extern int r, n;
extern Tensor t, out, loss, data, target, output, weight;
extern std::vector<Tensor> outs, ins, params;
extern void (*fn)(lockstep::ProcessGroup);
extern void train();
extern void train(const Tensor& data, const Tensor& target);

extern Net model, m, net;
extern lockstep::DistributedDataParallel<NetImpl> ddp;
extern lockstep::ZeroRedundancyOptimizer<lockstep::FusedAdamW> optimizer, opt;
extern lockstep::Value state;
extern torch::optim::AdamWOptions options;
extern std::vector<lockstep::ParameterRule> rules;
extern std::vector<std::string> names;
extern std::vector<torch::Device> devices;
extern torch::Device device;
extern lockstep::LRScheduler scheduler;
extern lockstep::Schedule a, b;
extern lockstep::WeightAverage average;
extern lockstep::Accuracy accuracy;
extern lockstep::TrainingRun run;
extern std::string folder, tag, path;
extern double value;
extern int64_t step, e;

extern Samples ds;
extern LibTorchSamples dataset;
extern std::vector<double> weights;
extern std::vector<size_t> indices;
extern lockstep::DistributedSampler s, sampler;
extern lockstep::DataLoader<Samples> loader;
extern std::vector<Example<>> micro_batches;
extern size_t index;
extern at::Generator random;
extern Example<> get(size_t index, at::Generator& random);
const auto open = [] { return Samples(); };
struct Events {
  std::optional<Tensor> next() { return std::nullopt; }
};
const auto open_part = [](const lockstep::StreamPart&) { return Events(); };
extern lockstep::StreamPart part;
extern lockstep::StreamLoader<decltype(open_part)> stream_loader;
const auto f = [](auto argument) { return argument; };
extern Tensor function(Tensor input);
extern Tensor body(Tensor images);
extern Tensor loss_of(const Example<>& batch);

template <class... Kinds>
struct OptionKinds {
  /// Whether one of the kinds has all members that `has` initializes, in this order.
  static constexpr bool one(auto has) { return (has.template operator()<Kinds>() || ...); }
};
using Options =
    OptionKinds<lockstep::ProcessGroupOptions, lockstep::DistributedDataParallelOptions, lockstep::DataLoaderOptions,
                lockstep::DistributedSamplerOptions, lockstep::TrainingRunOptions>;

#include "from_pytorch.inc"

}  // namespace from_pytorch

#pragma GCC diagnostic pop
