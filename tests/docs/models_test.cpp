#include <gtest/gtest.h>
#include <torch/torch.h>

#include "models_snippets.h"  // namespace models_page, extracted from docs/models.md

#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace models_page {
namespace {

using namespace lockstep;

void on_two(const std::function<void(ProcessGroup)>& body) {
  on_every_rank("shm", 2, body);
}

Tensor data_of(int rank) {
  return torch::randn({5, 6}, at::detail::createCPUGenerator(rank));
}

Tensor target_of(int rank) {
  return torch::randint(0, 4, {5}, at::detail::createCPUGenerator(10 + rank), torch::kLong);
}

bool is_on_all_ranks(const Tensor& tensor, const ProcessGroup& world) {
  for (const auto& other : world.all_gather_object(tensor.detach()))
    if (!other.toTensor().equal(tensor.detach())) return false;
  return true;
}

TEST(ModelsPage, AScriptIsTrainedAndSaved) {
  TemporaryFolder folder;
  on_two([&](const ProcessGroup& world) {
    const auto path = (folder.path() / "model.pt").string();
    torch::jit::Module script("Net");
    script.register_parameter("weight", torch::zeros({6, 4}).requires_grad_(), false);
    script.define("def forward(self, x):\n  return torch.matmul(x, self.weight)\n");
    script.save(path);
    auto loss_of = [&](torch::jit::Module& net) {
      return F::cross_entropy(net.forward({data_of(world.rank())}).toTensor(), target_of(world.rank())).item<double>();
    };
    const double before = loss_of(script);
    train_script_file(path, world, data_of(world.rank()), target_of(world.rank()));
    if (world.rank() != 0) return;
    auto trained = torch::jit::load(path);
    EXPECT_LT(loss_of(trained), before);
  });
}

TEST(ModelsPage, AFunctionIsTrained) {
  on_two([](const ProcessGroup& world) {
    Regression model;
    auto ddp = wrap_regression(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    F::cross_entropy(ddp(data_of(world.rank())), target_of(world.rank())).backward();
    optimizer.step();
    EXPECT_GT(model.weight.abs().sum().item<double>(), 0);
    EXPECT_TRUE(is_on_all_ranks(model.weight, world));
  });
}

TEST(ModelsPage, AMemberIsAveraged) {
  on_two([](const ProcessGroup& world) {
    AgentImpl agent(torch::nn::Linear(6, 4), world);
    F::cross_entropy(agent.forward(data_of(world.rank())), target_of(world.rank())).backward();
    EXPECT_TRUE(agent.named_parameters().contains("policy.weight"));
    EXPECT_TRUE(is_on_all_ranks(agent.policy->weight.grad(), world));
    EXPECT_FALSE(is_on_all_ranks(agent.scale.grad(), world));
  });
}

TEST(ModelsPage, TheHeadIsTrainedFirst) {
  on_two([](const ProcessGroup& world) {
    torch::nn::Sequential model(torch::nn::Linear(6, 8), torch::nn::Tanh(), torch::nn::Linear(8, 4));
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const auto before = model[0]->parameters()[0].detach().clone();
    train_head_first(ddp, *model[0], optimizer, data_of(world.rank()), target_of(world.rank()));
    EXPECT_FALSE(model[0]->parameters()[0].equal(before));
    ddp.check_replicas();
  });
}

TEST(ModelsPage, ATableHasSparseGradients) {
  on_two([](const ProcessGroup& world) {
    Words words;
    DistributedDataParallel ddp(words, world);
    ddp(torch::tensor({{world.rank(), 7}})).sum().backward();
    EXPECT_EQ(words->table->weight.grad()._nnz(), 3);
  });
}

TEST(ModelsPage, GradientsAreReducedInFloat32) {
  on_two([](const ProcessGroup& world) {
    torch::nn::Linear model(6, 4);
    auto ddp = wrap_in_bfloat16(model, world);
    ddp(data_of(world.rank()).to(torch::kBFloat16)).sum().backward();
    EXPECT_EQ(model->weight.grad().scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(is_on_all_ranks(model->weight.grad(), world));
  });
}

}  // namespace
}  // namespace models_page
