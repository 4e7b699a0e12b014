// Training on several ranks equals one process on the concatenated batch, whatever the model, the options and the
// backend.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/run_threads.h>

#include "parallel/models.h"
#include "parallel/training.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

/// The long tier trains for longer.
int step_count() {
  const char* steps = std::getenv("LOCKSTEP_TEST_PARITY_STEPS");
  return steps ? std::atoi(steps) : 20;
}

/// A token model: embedding, one block of self-attention, a head.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    table = register_module("table", torch::nn::Embedding(11, 8));
    attention = register_module("attention", torch::nn::MultiheadAttention(8, 2));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
    head = register_module("head", torch::nn::Linear(8, 4));
  }
  torch::Tensor forward(torch::Tensor x) {
    auto tokens = (x.narrow(1, 0, 6) * 3).floor().to(torch::kLong).remainder(11).t();
    auto h = table(tokens);
    h = norm(h + std::get<0>(attention(h, h, h)));
    return head(h.mean(0));
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Attention);

/// With statistics that are not of one rank's batch alone, which would be another function on each rank.
ConvNet evaluating_convnet() {
  ConvNet model;
  model->norm->eval();
  model->norm->running_var.fill_(0.7);
  return model;
}

template <class Forward>
void train_steps(Forward&& forward, torch::optim::Optimizer& optimizer,
                 const std::function<std::pair<torch::Tensor, torch::Tensor>(int)>& batch,
                 const std::function<void()>& after_step) {
  for (int step = 0; step < step_count(); ++step) {
    auto [data, target] = batch(step);
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(forward(data), target).backward();
    optimizer.step();
    after_step();
  }
}

struct Setting {
  std::string optimizer;
  at::ScalarType dtype;
  double tolerance;
};

const std::vector<Setting> kSettings{
    {"sgd", at::kFloat, 1e-6}, {"momentum", at::kDouble, 1e-12}, {"adam", at::kDouble, 1e-10}};

// Buckets of about one parameter each, so that several reductions overlap backward.
constexpr BucketLimits kParityBuckets{.first_bytes = 64, .cap_bytes = 512};

const std::vector<DistributedDataParallelOptions> kOptions{
    {.buckets = kParityBuckets},
    {.find_unused_parameters = true, .buckets = kParityBuckets},
    {.static_graph = true, .buckets = kParityBuckets},
    {.gradient_as_bucket_view = false},
    {.broadcast_buffers = false, .check_finite = true, .check_replicas_every = 10},
};

/// Trains a model on `size` ranks with every option and compares it with one process.
template <class MakeModel>
void expect_parity(const std::string& backend, int size, const std::vector<int64_t>& sample, MakeModel&& make) {
  for (const auto& [optimizer_name, dtype, tolerance] : kSettings) {
    auto alone = make();
    fill_parameters(*alone, 1);
    alone->to(dtype);
    auto optimizer = make_optimizer(optimizer_name, alone->parameters());
    auto whole_batch = [&, dtype = dtype](int step) {
      std::vector<torch::Tensor> data, targets;
      for (int rank = 0; rank < size; ++rank) {
        data.push_back(inputs_of(step, rank, sample, dtype));
        targets.push_back(targets_of(step, rank));
      }
      return std::pair(torch::cat(data), torch::cat(targets));
    };
    train_steps([&](torch::Tensor x) { return alone(x); }, *optimizer, whole_batch, [] {});

    for (size_t option = 0; option < kOptions.size(); ++option) {
      run_threads(size,
                  [&, &name = optimizer_name, dtype = dtype, tolerance = tolerance](ProcessGroup world) {
                    auto model = make();
                    fill_parameters(*model, 1 + world.rank());  // different ones: wrapping must take rank 0's
                    model->to(dtype);
                    DistributedDataParallel ddp(model, world, kOptions[option]);
                    auto mine = make_optimizer(name, ddp.parameters());
                    auto batch = [&](int step) {
                      return std::pair(inputs_of(step, world.rank(), sample, dtype), targets_of(step, world.rank()));
                    };
                    train_steps([&](torch::Tensor x) { return ddp(x); }, *mine, batch, [&] { ddp.check_replicas(); });
                    auto expected = alone->parameters(), actual = ddp.parameters();
                    for (size_t i = 0; i < expected.size(); ++i)
                      EXPECT_LE(relative_difference(actual[i], expected[i]), tolerance)
                          << backend << ", " << name << ", " << size << " ranks, options " << option << ", parameter "
                          << i;
                  },
                  {.backend = backend});
    }
  }
}

class Parity : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  const std::string backend = std::get<0>(GetParam());
  const int size = std::get<1>(GetParam());
};

TEST_P(Parity, OfAPerceptron) {
  expect_parity(backend, size, {6}, [] { return Mlp(); });
}

TEST_P(Parity, OfAConvolutionalNetwork) {
  expect_parity(backend, size, {1, 6, 6}, evaluating_convnet);
}

TEST_P(Parity, OfEmbeddingAndAttention) {
  expect_parity(backend, size, {6}, [] { return Attention(); });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Parity,
                         testing::Combine(testing::ValuesIn(backends_under_test()), testing::Values(2, 3, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace lockstep
