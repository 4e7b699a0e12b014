// Sparse gradients of embeddings.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using torch::Tensor;

struct TokensImpl : torch::nn::Module {
  explicit TokensImpl(bool sparse) {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 3).sparse(sparse)));
    head = register_module("head", torch::nn::Linear(3, 2));
    fill_parameters(*this, 1);
    to(at::kDouble);
  }
  Tensor forward(Tensor tokens) { return head(table(tokens).mean(1)); }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Tokens);

/// Few rows, of which some are those of both ranks.
Tensor tokens_of(int step, int rank) {
  return torch::randint(5 * rank, 5 * rank + 10, {4, 2}, at::detail::createCPUGenerator(10 * step + rank), at::kLong);
}

std::vector<Tensor> mean_token_gradients(int step, int ranks) {
  std::vector<Tensor> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    Tokens model(false);
    model(tokens_of(step, rank)).square().sum().backward();
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      const auto gradient = model->parameters()[i].grad() / ranks;
      if (sums.size() <= i)
        sums.push_back(gradient);
      else
        sums[i] += gradient;
    }
  }
  return sums;
}

class SparseRows : public testing::TestWithParam<std::string> {};

TEST_P(SparseRows, AreGatheredFromAllRanks) {
  on_every_rank(GetParam(), 2, [&](ProcessGroup world) {
    for (const bool densify : {false, true}) {
      Tokens model(true);
      DistributedDataParallel ddp(model, world, {.densify_sparse_gradients = densify});
      for (int step = 0; step < 3; ++step) {
        const auto means = mean_token_gradients(step, 2);
        for (auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
        ddp(tokens_of(step, world.rank())).square().sum().backward();
        const auto gradient = model->table->weight.grad();
        EXPECT_EQ(gradient.is_sparse(), !densify);
        if (!densify) {
          EXPECT_TRUE(gradient.is_coalesced());
          EXPECT_LE(gradient._nnz(), 15);
        }
        EXPECT_LT(relative_difference(densify ? gradient : gradient.to_dense(), means[0]), 1e-12);
        EXPECT_LT(relative_difference(model->head->weight.grad(), means[1]), 1e-12);
      }
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Over, SparseRows, testing::Values("threads", "shm"));

TEST(SparseGradients, AccumulateUnderNoSync) {
  run_threads(2, [&](ProcessGroup world) {
    Tokens model(true);
    DistributedDataParallel ddp(model, world);
    {
      auto guard = ddp.no_sync();
      ddp(tokens_of(0, world.rank())).square().sum().backward();
    }
    ddp(tokens_of(1, world.rank())).square().sum().backward();
    EXPECT_LT(relative_difference(model->table->weight.grad().to_dense(),
                                  mean_token_gradients(0, 2)[0] + mean_token_gradients(1, 2)[0]),
              1e-12);
  });
}

TEST(SparseGradients, AreWeightedByTheBatch) {
  run_threads(2, [&](ProcessGroup world) {
    Tokens model(true), dense(false);
    DistributedDataParallel ddp(model, world), reference(dense, world);
    for (auto* each : {&ddp, &reference}) {
      each->set_batch_weight(1 + 3 * world.rank());
      (*each)(tokens_of(0, world.rank())).square().mean().backward();
    }
    EXPECT_LT(relative_difference(model->table->weight.grad().to_dense(), dense->table->weight.grad()), 1e-12);
  });
}

TEST(SparseGradients, MayBeAllThatAModelHas) {
  run_threads(2, [&](ProcessGroup world) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(20, 3).sparse(true));
    fill_parameters(*table, 1);
    DistributedDataParallel ddp(table, world);
    for (int step = 0; step < 2; ++step) {
      table->weight.mutable_grad().reset();
      ddp(torch::tensor({world.rank()})).sum().backward();
      auto expected = torch::zeros({20, 3});
      expected.narrow(0, 0, 2).fill_(0.5);
      EXPECT_TRUE(table->weight.grad().to_dense().equal(expected));
    }
  });
}

TEST(SparseGradients, OfUnusedTablesAreEmptyOnThatRank) {
  run_threads(2, [&](ProcessGroup world) {
    Tokens model(true);
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true});
    const auto loss = world.rank() == 0 ? ddp(tokens_of(0, 0)).square().sum()
                                        : ddp->head(torch::zeros({1, 3}, at::kDouble)).square().sum();
    loss.backward();
    Tokens alone(false);
    alone(tokens_of(0, 0)).square().sum().backward();
    EXPECT_LT(relative_difference(model->table->weight.grad().to_dense(), alone->table->weight.grad() / 2), 1e-12);
  });
}

TEST(SparseGradients, AreDensifiedInAStaticGraphAndUnderNoSync) {
  run_threads(2, [&](ProcessGroup world) {
    for (const bool is_static : {false, true}) {
      Tokens model(true);
      DistributedDataParallel ddp(
          model, world,
          {.find_unused_parameters = !is_static, .static_graph = is_static, .densify_sparse_gradients = true});
      for (int step = 0; step < 2; ++step) {
        for (auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
        {
          auto guard = ddp.no_sync();
          ddp(tokens_of(step, world.rank())).square().sum().backward();
        }
        if (is_static)
          ddp(tokens_of(step, world.rank())).square().sum().backward();
        else
          ddp->head(torch::zeros({1, 3}, at::kDouble)).sum().backward();  // does not use the table
        EXPECT_LT(
            relative_difference(model->table->weight.grad(), mean_token_gradients(step, 2)[0] * (is_static ? 2 : 1)),
            1e-12);
      }
    }
  });
}

TEST(SparseGradients, MayHaveMoreThanRows) {
  run_threads(2, [&](ProcessGroup world) {
    auto weight = torch::ones({4, 3}).requires_grad_();
    DistributedDataParallel ddp({{"w", weight}},
                                [&](Tensor index) { return torch::gather(weight, 1, index, /*sparse_grad=*/true); },
                                world, {.sparse_parameters = {"w"}});
    ddp(torch::full({4, 1}, world.rank(), at::kLong)).sum().backward();
    auto expected = torch::zeros({4, 3});
    expected.narrow(1, 0, 2).fill_(0.5);
    EXPECT_TRUE(weight.grad().to_dense().equal(expected));
    auto number = torch::ones({}).requires_grad_();
    auto times = [&](Tensor x) { return x * number; };
    expect_error<UsageError>(
        [&] {
          DistributedDataParallel other({{"n", number}}, times, world, {.sparse_parameters = {"n"}});
        },
        "'n'", "no rows");
  });
}

TEST(SparseGradients, OfFunctionsMustBeNamed) {
  auto weight = torch::ones({20, 3}).requires_grad_();
  auto look_up = [&](Tensor tokens) { return torch::embedding(weight, tokens, -1, false, /*sparse=*/true); };
  run_threads(1, [&](ProcessGroup world) {
    DistributedDataParallel ddp({{"w", weight}}, look_up, world, {.sparse_parameters = {"w"}});
    ddp(torch::tensor({3})).sum().backward();
    EXPECT_TRUE(weight.grad().is_sparse());
    weight.mutable_grad().reset();
    expect_error<UsageError>(
        [&] {
          DistributedDataParallel other({{"w", weight}}, look_up, world, {.sparse_parameters = {"v"}});
        },
        "sparse_parameters names 'v'");
  });
  run_threads(1, [&](ProcessGroup world) {
    weight.mutable_grad().reset();
    DistributedDataParallel ddp({{"w", weight}}, look_up, world);
    expect_error<UsageError>([&] { ddp(torch::tensor({3})).sum().backward(); }, "parameter 'w'", "Sparse",
                             "sparse_parameters", "densify_sparse_gradients");
  });
}

}  // namespace
}  // namespace lockstep
