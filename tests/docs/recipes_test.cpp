#include <filesystem>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "recipes_snippets.h"  // namespace recipes_page, extracted from docs/recipes.md

#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// The oracle is one process on the concatenated batch, or on the same batches in another way.

namespace recipes_page {
namespace {

using namespace lockstep;

constexpr int kRanks = 2;
constexpr double kTolerance = 1e-10;  // relative, in float64
const auto kDouble = torch::TensorOptions(torch::kDouble);

Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed), kDouble);
}

Tensor random_classes(int64_t count, int64_t classes, uint64_t seed) {
  return torch::randint(classes, {count}, at::detail::createCPUGenerator(seed), torch::kLong);
}

Example<> random_batch(int64_t samples, uint64_t seed) {
  return {random({samples, 6}, seed), random_classes(samples, 4, seed)};
}

Example<> concatenated(const std::vector<Example<>>& batches) {
  std::vector<Tensor> data, targets;
  for (const auto& batch : batches) {
    data.push_back(batch.data);
    targets.push_back(batch.target);
  }
  return {torch::cat(data), torch::cat(targets)};
}

/// A model in float64, the same on every rank and in the oracle.
template <class Net>
Net made(Net net) {
  net->to(torch::kDouble);
  fill_parameters(*net, 1);
  return net;
}

torch::nn::Sequential two_layers(int64_t inputs, int64_t outputs) {
  return made(torch::nn::Sequential(torch::nn::Linear(inputs, 8), torch::nn::Tanh(), torch::nn::Linear(8, outputs)));
}

void expect_equal_parameters(const torch::nn::Module& actual, const torch::nn::Module& expected) {
  const auto values = expected.named_parameters();
  for (const auto& item : actual.named_parameters())
    EXPECT_LT(relative_difference(item.value(), values[item.key()]), kTolerance) << item.key();
}

bool is_equal_on_all_ranks(const Tensor& tensor, const ProcessGroup& world) {
  for (const auto& other : world.all_gather_object(tensor.detach()))
    if (!other.toTensor().equal(tensor)) return false;
  return true;
}

void on_two_ranks(const std::function<void(ProcessGroup)>& body) {
  on_every_rank("shm", kRanks, body);
}

// --- GAN

struct Gan {
  torch::nn::Sequential generator = two_layers(3, 5);
  torch::nn::Sequential discriminator = two_layers(5, 1);
};

CommHook counting_hook(int& calls) {
  return [&calls](const GradientBucket& bucket, const ProcessGroup& group) {
    ++calls;
    auto work = group.all_reduce_async(bucket.buffer, ReduceOp::kAvg);
    return [work] { work.wait(); };
  };
}

/// As train_gan, in one process. Returns the discriminator's gradients of its own loss.
std::vector<Tensor> train_gan_alone(Gan& gan, torch::optim::Optimizer& generator_optimizer,
                                    torch::optim::Optimizer& discriminator_optimizer, const Tensor& real,
                                    const Tensor& noise) {
  auto classify = [&](const Tensor& input, double as) {
    const auto output = gan.discriminator->forward(input);
    return F::binary_cross_entropy_with_logits(output, torch::full_like(output, as));
  };
  discriminator_optimizer.zero_grad();
  (classify(real, 1) + classify(gan.generator->forward(noise).detach(), 0)).backward();
  std::vector<Tensor> gradients;
  for (const auto& parameter : gan.discriminator->parameters()) gradients.push_back(parameter.grad().clone());
  discriminator_optimizer.step();

  generator_optimizer.zero_grad();
  classify(gan.generator->forward(noise), 1).backward();
  generator_optimizer.step();
  return gradients;
}

TEST(Recipes, AGanTrainsAsInOneProcessAndReducesEachNetworkOnce) {
  on_two_ranks([](const ProcessGroup& world) {
    Gan gan, alone;
    DistributedDataParallel generator(gan.generator, world);
    DistributedDataParallel discriminator(gan.discriminator, world);
    int generator_reductions = 0;
    int discriminator_reductions = 0;
    generator.register_comm_hook(counting_hook(generator_reductions));
    discriminator.register_comm_hook(counting_hook(discriminator_reductions));
    torch::optim::Adam generator_optimizer(generator.parameters(), 0.01);
    torch::optim::Adam discriminator_optimizer(discriminator.parameters(), 0.01);
    torch::optim::Adam generator_alone(alone.generator->parameters(), 0.01);
    torch::optim::Adam discriminator_alone(alone.discriminator->parameters(), 0.01);
    for (uint64_t step = 1; step <= 3; ++step) {
      const auto real = random({8, 5}, 10 * step);
      const auto noise = random({8, 3}, 10 * step + 1);
      train_gan(generator, discriminator, generator_optimizer, discriminator_optimizer,
                real.chunk(kRanks)[world.rank()], noise.chunk(kRanks)[world.rank()]);
      const auto gradients = train_gan_alone(alone, generator_alone, discriminator_alone, real, noise);
      for (size_t i = 0; i < gradients.size(); ++i)
        EXPECT_LT(relative_difference(discriminator.parameters()[i].grad(), gradients[i]), kTolerance)
            << "the generator's step changed the discriminator's gradients";
    }
    expect_equal_parameters(*gan.generator, *alone.generator);
    expect_equal_parameters(*gan.discriminator, *alone.discriminator);
    EXPECT_EQ(generator_reductions, 3);
    EXPECT_EQ(discriminator_reductions, 3);
  });
}

TEST(Recipes, AGanMayHaveBatchNormalization) {
  on_two_ranks([](const ProcessGroup& world) {
    using torch::nn::BatchNorm1d, torch::nn::Linear, torch::nn::Sequential;
    DistributedDataParallel generator(made(Sequential(Linear(3, 8), BatchNorm1d(8), Linear(8, 5))), world);
    DistributedDataParallel discriminator(made(Sequential(Linear(5, 8), BatchNorm1d(8), Linear(8, 1))), world);
    torch::optim::Adam generator_optimizer(generator.parameters(), 0.01);
    torch::optim::Adam discriminator_optimizer(discriminator.parameters(), 0.01);
    for (uint64_t step = 0; step < 3; ++step)
      train_gan(generator, discriminator, generator_optimizer, discriminator_optimizer,
                random({4, 5}, 10 * step + world.rank()), random({4, 3}, 10 * step + 5 + world.rank()));
    generator.check_replicas();
    discriminator.check_replicas();
  });
}

TEST(Recipes, ADiscriminatorUnderNoSyncIsNotReduced) {
  on_two_ranks([](const ProcessGroup& world) {
    Gan gan;
    DistributedDataParallel generator(gan.generator, world);
    DistributedDataParallel discriminator(gan.discriminator, world);
    int reductions = 0;
    discriminator.register_comm_hook(counting_hook(reductions));
    {
      auto guard = discriminator.no_sync();
      discriminator(generator(random({4, 3}, 1 + world.rank()))).mean().backward();
    }
    EXPECT_EQ(reductions, 0);
    EXPECT_TRUE(is_equal_on_all_ranks(generator.parameters()[0].grad(), world));
    EXPECT_FALSE(is_equal_on_all_ranks(discriminator.parameters()[0].grad(), world));
  });
}

// --- reinforcement learning

Rollout rollout_of(int64_t steps, uint64_t seed) {
  return {random({steps, 6}, seed), random_classes(steps, 4, seed), -random({steps}, seed + 1).abs(),
          random({steps}, seed + 2) + static_cast<double>(seed)};
}

Rollout concatenated(const Rollout& a, const Rollout& b) {
  return {torch::cat({a.states, b.states}), torch::cat({a.actions, b.actions}), torch::cat({a.log_probs, b.log_probs}),
          torch::cat({a.advantages, b.advantages})};
}

TEST(Recipes, APolicyIsUpdatedByTheMeanOverAllTimeSteps) {
  on_two_ranks([](const ProcessGroup& world) {
    const Rollout rollouts[kRanks] = {rollout_of(3, 10), rollout_of(9, 20)};
    const auto all = concatenated(rollouts[0], rollouts[1]);

    const auto normalized = normalize_advantages(rollouts[world.rank()].advantages, world);
    const auto expected = (all.advantages - all.advantages.mean()) / all.advantages.std(/*unbiased=*/false);
    EXPECT_TRUE(normalized.allclose(expected.split_with_sizes({3, 9})[world.rank()], 1e-6));

    auto net = made(Mlp());
    DistributedDataParallel policy(net, world);
    torch::optim::SGD optimizer(policy.parameters(), 0.1);
    update_policy(policy, optimizer, rollouts[world.rank()], /*parts=*/1, world);

    auto alone = made(Mlp());
    torch::optim::SGD optimizer_alone(alone->parameters(), 0.1);
    const auto log_probs = alone(all.states).log_softmax(1).gather(1, all.actions.unsqueeze(1)).squeeze(1);
    const auto ratio = (log_probs - all.log_probs).exp();
    const auto scaled = (all.advantages - all.advantages.mean()) / (all.advantages.std(false) + 1e-8);
    (-torch::min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()).backward();
    optimizer_alone.step();
    expect_equal_parameters(*net, *alone);
  });
}

TEST(Recipes, AShortRolloutMayHaveEmptyParts) {
  on_two_ranks([](const ProcessGroup& world) {
    for (int64_t shortest : {0, 3}) {
      DistributedDataParallel policy(made(Mlp()), world);
      torch::optim::SGD optimizer(policy.parameters(), 0.1);
      update_policy(policy, optimizer, rollout_of(world.rank() == 0 ? shortest : 9, 10), /*parts=*/5, world);
      policy.check_replicas();
      for (const auto& parameter : policy.parameters()) EXPECT_TRUE(parameter.isfinite().all().item<bool>());
    }
  });
}

TEST(Recipes, EpisodesOfDifferentLengthsTrainAsInOneProcess) {
  on_two_ranks([](const ProcessGroup& world) {
    const auto episode_of = [](int rank) {
      std::vector<Rollout> parts;
      for (int i = 0; i < 2 + 3 * rank; ++i) parts.push_back(rollout_of(3 + rank + i, 10 * rank + 2 * i));
      return parts;
    };
    auto net = made(Mlp());
    DistributedDataParallel policy(net, world);
    torch::optim::SGD optimizer(policy.parameters(), 0.01);
    const auto episode = episode_of(world.rank());
    size_t next = 0;
    train_on_episode(policy, optimizer, [&]() -> std::optional<Rollout> {
      if (next == episode.size()) return std::nullopt;
      const torch::NoGradGuard no_grad;
      policy->forward(episode[next].states);  // is no iteration of the join
      return episode[next++];
    });
    EXPECT_EQ(next, episode.size());
    policy.check_replicas();

    auto alone = made(Mlp());
    torch::optim::SGD optimizer_alone(alone->parameters(), 0.01);
    const auto first = episode_of(0), second = episode_of(1);
    for (size_t i = 0; i < second.size(); ++i) {
      const auto part = i < first.size() ? concatenated(first[i], second[i]) : second[i];
      optimizer_alone.zero_grad();
      const auto log_probs = alone(part.states).log_softmax(1).gather(1, part.actions.unsqueeze(1)).squeeze(1);
      (-log_probs * part.advantages).mean().backward();
      optimizer_alone.step();
    }
    expect_equal_parameters(*net, *alone);
  });
}

TEST(Recipes, EpisodesOfAllRanksAreGathered) {
  on_two_ranks([](const ProcessGroup& world) {
    const auto mine = world.rank() == 0 ? torch::tensor({1., 2., 3.}) : torch::tensor({4.});
    EXPECT_TRUE(gather_returns(mine, world).equal(torch::tensor({1., 2., 3., 4.})));
  });
}

// --- accumulation

TEST(Recipes, UnequalMicroBatchesAccumulateAsOneBatch) {
  const std::vector<std::vector<int64_t>> sizes_of_steps[] = {{{5, 1, 2}, {3}}, {{1}, {4, 7}}, {{0}, {2, 3}}};
  on_two_ranks([&](const ProcessGroup& world) {
    auto net = made(Mlp());
    auto alone = made(Mlp());
    DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::SGD optimizer_alone(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    uint64_t seed = 0;
    for (const auto& sizes : sizes_of_steps) {
      std::vector<std::vector<Example<>>> batches(kRanks);
      std::vector<Example<>> all;
      for (int rank = 0; rank < kRanks; ++rank)
        for (int64_t size : sizes[rank]) {
          batches[rank].push_back(random_batch(size, ++seed));
          all.push_back(batches[rank].back());
        }
      accumulate_step(ddp, optimizer, batches[world.rank()]);
      const auto batch = concatenated(all);
      optimizer_alone.zero_grad();
      F::cross_entropy(alone(batch.data), batch.target).backward();
      optimizer_alone.step();
    }
    expect_equal_parameters(*net, *alone);
  });
}

// --- sequences

struct TaggerImpl : torch::nn::Module {
  TaggerImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(7, 5));
    output = register_module("output", torch::nn::Linear(5, 7));
  }
  Tensor forward(const Tensor& tokens) { return output(torch::tanh(embedding(tokens))); }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear output{nullptr};
};
TORCH_MODULE(Tagger);

TEST(Recipes, PaddedSequencesTrainAsTheirTokensWould) {
  on_two_ranks([](const ProcessGroup& world) {
    const std::vector<Tensor> sequences{random_classes(3, 7, 1), random_classes(2, 7, 2), random_classes(9, 7, 3),
                                        random_classes(4, 7, 4)};
    auto net = made(Tagger());
    DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const auto first = sequences.begin() + 2 * world.rank();
    const auto batch = pad({first, first + 2});
    EXPECT_EQ(batch.data.sizes(), batch.target.sizes());
    train_tokens(ddp, optimizer, batch);

    auto alone = made(Tagger());
    torch::optim::SGD optimizer_alone(alone->parameters(), 0.1);
    std::vector<Tensor> inputs, targets;
    for (const auto& sequence : sequences) {
      inputs.push_back(sequence.slice(0, 0, -1));
      targets.push_back(sequence.slice(0, 1));
    }
    F::cross_entropy(alone(torch::cat(inputs)), torch::cat(targets)).backward();
    optimizer_alone.step();
    expect_equal_parameters(*net, *alone);
  });
}

TEST(Recipes, ALoaderPadsItsBatches) {
  struct Sequences {
    size_t size() const { return 4; }
    Tensor get(size_t index) const { return torch::full({static_cast<int64_t>(index) + 2}, 5, torch::kLong); }
  };
  DistributedSampler sampler(4, 0, 1, {.shuffle = false});
  DataLoader loader(Sequences(), sampler, pad, {.batch_size = 4});
  for (auto& batch : loader) {
    EXPECT_EQ(batch.data.sizes(), at::IntArrayRef({4, 4}));
    EXPECT_EQ(batch.target.ne(kIgnored).sum().item<int64_t>(), 1 + 2 + 3 + 4);
  }
}

// --- evaluation

struct Samples {
  Example<> all;
  size_t size() const { return static_cast<size_t>(all.data.size(0)); }
  Example<> get(size_t index) const {
    return {all.data[static_cast<int64_t>(index)], all.target[static_cast<int64_t>(index)]};
  }
};

TEST(Recipes, AnEvaluationCountsEverySampleOnce) {
  on_two_ranks([](const ProcessGroup& world) {
    auto net = made(torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8), torch::nn::Linear(8, 4)));
    DistributedDataParallel ddp(net, world);
    ddp(random({4, 6}, 100 + world.rank())).sum().backward();
    EXPECT_FALSE(is_equal_on_all_ranks(net->named_buffers()["1.running_mean"], world));

    const Samples samples{random_batch(35, 1)};
    const auto metrics = evaluate(ddp, samples, world);
    EXPECT_TRUE(net->is_training());
    EXPECT_TRUE(is_equal_on_all_ranks(net->named_buffers()["1.running_mean"], world));

    net->eval();
    const auto output = net->forward(samples.all.data);
    EXPECT_NEAR(metrics.loss, F::cross_entropy(output, samples.all.target).item<double>(), 1e-12);
    EXPECT_EQ(metrics.accuracy, output.argmax(1).eq(samples.all.target).sum().item<double>() / 35);
  });
}

// --- resuming

/// Fails after a number of reads, as if the job were interrupted.
struct InterruptedSamples : Samples {
  std::shared_ptr<int> reads_left;
  Example<> get(size_t index) const {
    if ((*reads_left)-- == 0) throw std::runtime_error("interrupted");
    return Samples::get(index);
  }
};

TEST(Recipes, AResumedTrainingContinuesBitByBit) {
  on_two_ranks([](const ProcessGroup& world) {
    const TemporaryFolder own;
    const auto root = world.broadcast_object(own.path().string(), 0).toStringRef();
    const Samples samples{random_batch(24, 1)};  // 3 steps of 4 samples in each epoch
    const auto file = [&](const char* name) { return root + "/" + name; };
    auto expected = made(Mlp());
    train_or_resume(expected, samples, file("whole"), /*epochs=*/3, /*save_every=*/100, world);

    const InterruptedSamples interrupted{samples, std::make_shared<int>(17)};  // in the second step of the second epoch
    auto lost = made(Mlp());
    expect_error<Error>([&] { train_or_resume(lost, interrupted, file("parts"), 3, 2, world); }, "interrupted");
    EXPECT_TRUE(std::filesystem::exists(file("parts") + "/step-00000003.pt"));

    auto resumed = made(Mlp());
    fill_parameters(*resumed, 2);  // which the saved parameters replace
    train_or_resume(resumed, samples, file("parts"), 3, 100, world);
    for (const auto& item : expected->named_parameters())
      EXPECT_TRUE(item.value().equal(resumed->named_parameters()[item.key()])) << item.key();
    world.barrier();  // before rank 0 removes the folder
  });
}

TEST(Recipes, ReplicasDivergeIfOneRankHasNoOptimizerState) {
  on_two_ranks([](const ProcessGroup& world) {
    DistributedDataParallel ddp(made(Mlp()), world);
    auto step = [&](torch::optim::Optimizer& optimizer) {
      optimizer.zero_grad();
      ddp(random({4, 6}, 1 + world.rank())).sum().backward();
      optimizer.step();
    };
    torch::optim::SGD before(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    step(before);
    const auto state = state_dict(before);
    torch::optim::SGD after(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    if (world.rank() == 0) load_state_dict(after, state);
    step(after);
    expect_error<MismatchError>([&] { ddp.check_replicas(); }, "diverged");
  });
}

// --- uneven inputs

std::vector<Example<>> uneven_batches(int rank) {
  std::vector<Example<>> batches;
  for (int i = 0; i < 2 + 3 * rank; ++i) batches.push_back(random_batch(3 + rank, 100 * rank + i));
  return batches;
}

TEST(Recipes, UnevenInputsTrainAsInOneProcess) {
  on_two_ranks([](const ProcessGroup& world) {
    auto net = made(Mlp());
    DistributedDataParallel ddp(net, world);
    ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(ddp.parameters(), world, torch::optim::AdamWOptions(0.01));
    const double mean_loss = train_uneven(ddp, optimizer, uneven_batches(world.rank()), world);

    auto alone = made(Mlp());
    torch::optim::AdamW optimizer_alone(alone->parameters(), torch::optim::AdamWOptions(0.01));
    const auto first = uneven_batches(0), second = uneven_batches(1);
    double sum = 0;
    int64_t samples = 0;
    for (size_t i = 0; i < second.size(); ++i) {
      const auto batch = i < first.size() ? concatenated({first[i], second[i]}) : second[i];
      optimizer_alone.zero_grad();
      const auto loss = F::cross_entropy(alone(batch.data), batch.target);
      loss.backward();
      optimizer_alone.step();
      sum += loss.item<double>() * static_cast<double>(batch.target.size(0));
      samples += batch.target.size(0);
    }
    EXPECT_NEAR(mean_loss, sum / static_cast<double>(samples), 1e-10);
    expect_equal_parameters(*net, *alone);
    ddp.check_replicas();
  });
}

TEST(Recipes, ACollectiveInsideAJoinIsAMismatch) {
  run_threads_into_an_error(kRanks, [](const ProcessGroup& world) {
    DistributedDataParallel ddp(made(Mlp()), world);
    auto loop = [&] {
      for (const auto& batch : uneven_batches(world.rank())) {
        auto loss = F::cross_entropy(ddp(batch.data), batch.target);
        loss.backward();
        auto sum = loss.detach().clone();
        world.all_reduce(sum);
      }
    };
    EXPECT_THROW(ddp.join(loop), MismatchError);
  });
}

// --- seeds

struct DroppingNetImpl : torch::nn::Module {
  DroppingNetImpl() {
    first = register_module("first", torch::nn::Linear(6, 16));
    second = register_module("second", torch::nn::Linear(16, 4));
  }
  Tensor forward(const Tensor& x) { return second(torch::dropout(torch::relu(first(x)), 0.5, is_training())); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(DroppingNet);

TEST(Recipes, ASeededTrainingIsTheSameInEveryRun) {
  if (!ranks_are_processes()) GTEST_SKIP() << "ranks that are threads share LibTorch's default generator";
  on_two_ranks([](const ProcessGroup& world) {
    const NoisyDataset dataset{random({24, 6}, 1).to(torch::kFloat), random_classes(24, 4, 1)};
    auto trained = [&](uint64_t seed, int workers) {
      return torch::nn::utils::parameters_to_vector(
          train_seeded<DroppingNet>(seed, dataset, /*epochs=*/2, workers, world)->parameters());
    };
    const auto expected = trained(/*seed=*/5, /*workers=*/1);
    EXPECT_TRUE(is_equal_on_all_ranks(expected, world));
    EXPECT_TRUE(trained(5, 1).equal(expected));
    EXPECT_TRUE(trained(5, 0).equal(expected));
    EXPECT_TRUE(trained(5, 3).equal(expected));
    EXPECT_FALSE(trained(6, 1).equal(expected));
  });
}

TEST(Recipes, EachRankAndEpochHasItsOwnSeed) {
  if (!ranks_are_processes()) GTEST_SKIP() << "ranks that are threads share LibTorch's default generator";
  on_two_ranks([](const ProcessGroup& world) {
    std::vector<Tensor> drawn;
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      seed_epoch(5, epoch, world);
      for (const auto& values : world.all_gather_object(torch::rand({8}))) drawn.push_back(values.toTensor());
    }
    for (size_t i = 0; i < drawn.size(); ++i)
      for (size_t j = 0; j < i; ++j) EXPECT_FALSE(drawn[i].equal(drawn[j])) << i << ", " << j;
  });
}

TEST(Recipes, GlobalBatchesDoNotDependOnTheNumberOfRanks) {
  auto global_batch = [](int ranks, size_t number) {
    const size_t size = 12 / ranks;
    std::set<size_t> samples;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto mine = distributed_indices(48, rank, ranks, {.seed = 3}, /*epoch=*/1);
      samples.insert(mine.begin() + number * size, mine.begin() + (number + 1) * size);
    }
    return samples;
  };
  for (size_t number = 0; number < 4; ++number)
    for (int ranks : {2, 3, 4, 6}) EXPECT_EQ(global_batch(ranks, number), global_batch(1, number));
}

}  // namespace
}  // namespace recipes_page
