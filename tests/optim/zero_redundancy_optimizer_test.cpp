#include <lockstep/zero_redundancy_optimizer.h>

#include <latch>
#include <limits>

#include <gtest/gtest.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/gradient_tools.h>
#include <lockstep/run_threads.h>

#include "optim/stepping.h"
#include "parallel/gradients.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using namespace torch::optim;

/// Its largest parameter is most of it, one lies in another order in memory, and one has another dtype.
struct LopsidedImpl : torch::nn::Module {
  LopsidedImpl() {
    table = register_parameter("table", torch::zeros({6, 50}, torch::kDouble));
    kernel = register_parameter("kernel",
                                torch::zeros({2, 3, 4, 4}, torch::kDouble).contiguous(at::MemoryFormat::ChannelsLast));
    bias = register_parameter("bias", torch::zeros({4}, torch::kDouble));
    scale = register_parameter("scale", torch::zeros({}, torch::kDouble));
    narrow = register_parameter("narrow", torch::zeros({5}, torch::kFloat));
    fill_parameters(*this, 3);
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto rows = torch::mm(x.to(torch::kDouble), table).tanh();
    return (rows.sum(1) * scale + kernel.square().sum() * x.mean() + (bias * rows.narrow(1, 0, 4)).sum(1) +
            (narrow.square().sum() * x.sum()).to(torch::kDouble))
        .square();
  }
  torch::Tensor table, kernel, bias, scale, narrow;
};
TORCH_MODULE(Lopsided);
constexpr size_t kNarrow = 4;  // of float32, for which it matters in which order gradients are added

void zero(const std::vector<torch::Tensor>& parameters) {
  for (const auto& parameter : parameters) parameter.mutable_grad().reset();
}

template <class Ddp>
void train(Ddp& ddp, Optimizer& optimizer, int rank, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    zero(ddp.parameters());
    ddp(input_of(10 * step + rank)).mean().backward();
    optimizer.step();
  }
}

/// What ranks train together, with the state on each of them.
template <class Inner, class Options>
std::vector<torch::Tensor> expected_after(int ranks, int steps, Options options) {
  std::vector<torch::Tensor> result;
  run_threads(ranks, [&](ProcessGroup world) {
    Lopsided model;
    DistributedDataParallel ddp(model, world);
    Inner optimizer(ddp.parameters(), options);
    train(ddp, optimizer, world.rank(), 0, steps);
    if (world.rank() == 0)
      for (const auto& parameter : ddp.parameters()) result.push_back(parameter.detach().clone());
  });
  return result;
}

template <class Inner, class Options>
void expect_the_same_training(Options options, const ZeroRedundancyOptions& how = {}) {
  for (int ranks : {1, 2, 3}) {
    const auto expected = expected_after<Inner>(ranks, 4, options);
    for (const auto& backend : backends_under_test())
      run_threads(ranks,
                  [&](ProcessGroup world) {
                    Lopsided model;
                    DistributedDataParallel ddp(model, world);
                    ZeroRedundancyOptimizer<Inner> optimizer(ddp.parameters(), world, options, how);
                    EXPECT_EQ(model->kernel.stride(1), 1) << "the layout stays";
                    train(ddp, optimizer, world.rank(), 0, 4);
                    expect_equal(ddp.parameters(), expected, 1e-12, backend);
                    ddp.check_replicas();
                  },
                  {.backend = backend});
  }
}

TEST(ZeroRedundancyOptimizer, TrainsAsWithAllOfTheState) {
  expect_the_same_training<AdamW>(AdamWOptions(0.01));
  expect_the_same_training<FusedAdamW>(AdamWOptions(0.01));
  expect_the_same_training<FusedSGD>(SGDOptions(0.01).momentum(0.9));
}

TEST(ZeroRedundancyOptimizer, TakesAllOfLibTorchsOptimizers) {
  expect_the_same_training<SGD>(SGDOptions(0.01).momentum(0.9).nesterov(true));
  expect_the_same_training<Adam>(AdamOptions(0.01).amsgrad(true));
  expect_the_same_training<RMSprop>(RMSpropOptions(0.001).centered(true));
  expect_the_same_training<Adagrad>(AdagradOptions(0.01));
}

/// Scales each parameter's step by the parameter's norm, and so must see all of it.
class NormScaled : public SGD {
 public:
  using SGD::SGD;
  torch::Tensor step(LossClosure = nullptr) override {
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined()) parameter.sub_(parameter.grad() * parameter.norm() * group.options().get_lr());
    return {};
  }
};

TEST(ZeroRedundancyOptimizer, KeepsParametersWholeWhereAsked) {
  expect_the_same_training<AdamW>(AdamWOptions(0.01), {.shard_by = ShardBy::kParameters});
  expect_the_same_training<NormScaled>(SGDOptions(0.01));  // by itself, since nothing is known of it
}

TEST(ZeroRedundancyOptimizer, EachRankHasItsShareOfTheState) {
  for (int ranks : {1, 2, 4})
    run_threads(ranks, [&](ProcessGroup world) {
      auto net = torch::nn::Sequential(torch::nn::Linear(300, 500), torch::nn::Linear(500, 10));
      DistributedDataParallel ddp(net.ptr(), world);
      ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp.parameters(), world, AdamWOptions(1e-3));
      for (const auto& parameter : ddp.parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
      optimizer.step();
      const int64_t elements = 300 * 500 + 500 + 500 * 10 + 10;
      const auto share = static_cast<double>(8 * elements) / ranks;
      EXPECT_LE(static_cast<double>(optimizer.state_bytes()), share + 8 * 128 * 5);
      auto all = torch::tensor({optimizer.state_bytes()});
      world.all_reduce(all);
      EXPECT_EQ(all.item<int64_t>(), 8 * elements) << "two moments";
    });
}

TEST(ZeroRedundancyOptimizer, DoesNotKeepGradientsThatZeroGradFrees) {
  run_threads(2, [&](ProcessGroup world) {
    auto net = torch::nn::Linear(30, 50);
    DistributedDataParallel ddp(net.ptr(), world, {.gradient_as_bucket_view = false});
    ZeroRedundancyOptimizer<AdamW> optimizer(ddp.parameters(), world, AdamWOptions(1e-3));
    ddp(torch::ones({2, 30})).sum().backward();
    std::weak_ptr<int> freed;
    {
      const auto token = std::make_shared<int>();
      freed = token;
      const auto gradient = net->weight.grad().clone();
      net->weight.mutable_grad() = torch::from_blob(
          gradient.data_ptr(), gradient.sizes(), [token, gradient](void*) {}, torch::kFloat);
    }
    optimizer.step();
    EXPECT_FALSE(freed.expired());
    for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    EXPECT_TRUE(freed.expired());
  });
}

// As the weights of a cuDNN RNN do, in another order than that of the parameters.
TEST(ZeroRedundancyOptimizer, ParametersOfOneStorageKeepTheirDistances) {
  run_threads(2, [&](ProcessGroup world) {
    const auto flat = torch::arange(30, torch::kFloat);
    std::vector<torch::Tensor> parameters{flat.narrow(0, 20, 10), torch::ones(7), flat.narrow(0, 0, 20).view({4, 5})};
    for (auto& parameter : parameters) parameter.requires_grad_();
    ZeroRedundancyOptimizer<SGD> optimizer(parameters, world, SGDOptions(1));
    EXPECT_EQ(parameters[0].data_ptr<float>(), parameters[2].data_ptr<float>() + 20);
    for (auto& parameter : parameters) parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    EXPECT_TRUE(parameters[0].equal(torch::arange(20, 30, torch::kFloat) - 1));
    EXPECT_TRUE(parameters[1].equal(torch::zeros(7)));
    EXPECT_TRUE(parameters[2].equal(torch::arange(20, torch::kFloat).view({4, 5}) - 1));
  });
}

TEST(ZeroRedundancyOptimizer, HasGroupsAndFollowsASchedule) {
  std::vector<torch::Tensor> expected;
  auto train_groups = [](auto& ddp, Optimizer& optimizer, int rank) {
    StepLR schedule(optimizer, 1, 0.5);
    for (int step = 0; step < 4; ++step) {
      train(ddp, optimizer, rank, step, step + 1);
      schedule.step();
    }
  };
  auto groups_of = [](Lopsided& model) {
    std::vector<OptimizerParamGroup> groups;
    groups.push_back(std::vector<torch::Tensor>{model->scale, model->table});
    groups.emplace_back(std::vector<torch::Tensor>{model->kernel, model->bias, model->narrow},
                        std::make_unique<AdamWOptions>(AdamWOptions(0.05).weight_decay(0.3)));
    return groups;
  };
  run_threads(2, [&](ProcessGroup world) {
    Lopsided model, other;
    DistributedDataParallel plain(model, world), sharded(other, world);
    AdamW theirs(groups_of(model), AdamWOptions(0.01));
    ZeroRedundancyOptimizer<AdamW> optimizer(groups_of(other), world, AdamWOptions(0.01));
    train_groups(plain, theirs, world.rank());
    train_groups(sharded, optimizer, world.rank());
    expect_equal(sharded.parameters(), plain.parameters(), 1e-12, "groups");
    EXPECT_LT(optimizer.param_groups()[1].options().get_lr(), 0.01);
    EXPECT_EQ(optimizer.step([] { return torch::tensor(7.0); }).item<double>(), 7);
  });
}

TEST(ZeroRedundancyOptimizer, CutsGradientsThatLieOtherwiseInMemory) {
  const auto sizes = std::vector<int64_t>{2, 3, 4, 4};
  const auto start = numbers(sizes, 1, torch::kDouble), gradient = numbers(sizes, 2, torch::kDouble);
  const auto expected = start - 0.1 * gradient;
  run_threads(2, [&](ProcessGroup world) {
    const auto parameter = start.contiguous(at::MemoryFormat::ChannelsLast).clone().requires_grad_();
    const auto empty = torch::zeros({0, 3}, torch::dtype(torch::kDouble).requires_grad(true));
    ZeroRedundancyOptimizer<SGD> optimizer({parameter, empty}, world, SGDOptions(0.1));
    parameter.mutable_grad() = gradient;
    empty.mutable_grad() = torch::zeros({0, 3}, torch::kDouble);
    optimizer.step();
    EXPECT_LE(relative_difference(parameter, expected), 1e-12);
  });
}

TEST(ZeroRedundancyOptimizer, ParametersComeBackWithValuesThatWereLoaded) {
  run_threads(2, [&](ProcessGroup world) {
    Lopsided model;
    ZeroRedundancyOptimizer<SGD> optimizer(model->parameters(), world, SGDOptions(0.5));
    model->bias.set_data(torch::full({4}, 3.0, torch::kDouble));  // what torch::load does
    model->bias.mutable_grad() = torch::ones({4}, torch::kDouble);
    optimizer.step();
    EXPECT_TRUE(torch::equal(model->bias, torch::full({4}, 2.5, torch::kDouble)));
    optimizer.step();
    EXPECT_TRUE(torch::equal(model->bias, torch::full({4}, 2.0, torch::kDouble)));
  });
}

TEST(ZeroRedundancyOptimizer, ParametersWithoutAGradientStay) {
  run_threads(2, [&](ProcessGroup world) {
    Lopsided model;
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(model->parameters(), world, AdamWOptions(0.1));
    const auto before = model->table.detach().clone(), bias = model->bias.detach().clone();
    model->bias.mutable_grad() = torch::ones({4}, torch::kDouble);
    optimizer.step();
    EXPECT_TRUE(torch::equal(model->table, before));
    EXPECT_FALSE(torch::equal(model->bias, bias));
  });
}

// --- the state of all

void expect_states_equal(const Value& actual, const Value& expected) {
  ASSERT_EQ(actual["state"].size(), expected["state"].size());
  for (const auto& [parameter, values] : expected["state"].items())
    for (const auto& [name, value] : values.items()) {
      const auto& tensor = actual["state"][parameter][name].tensor();
      EXPECT_EQ(tensor.sizes(), value.tensor().sizes()) << parameter << ' ' << name;
      EXPECT_LE(relative_difference(tensor, value.tensor()), 1e-12) << parameter << ' ' << name;
    }
  ASSERT_EQ(actual["param_groups"].size(), expected["param_groups"].size());
  for (size_t g = 0; g < expected["param_groups"].size(); ++g)
    for (const auto& [name, value] : expected["param_groups"][g].items())
      EXPECT_EQ(actual["param_groups"][g][name], value) << name;
}

TEST(ZeroRedundancyOptimizer, PutsTheStateOfAllTogether) {
  for (auto by : {ShardBy::kElements, ShardBy::kParameters})
    run_threads(3, [&](ProcessGroup world) {
      Lopsided model, other;
      DistributedDataParallel plain(model, world), sharded(other, world);
      AdamW theirs(plain.parameters(), AdamWOptions(0.01).amsgrad(true));
      ZeroRedundancyOptimizer<AdamW> optimizer(sharded.named_parameters(), world, AdamWOptions(0.01).amsgrad(true),
                                               {.shard_by = by});
      train(plain, theirs, world.rank(), 0, 3);
      train(sharded, optimizer, world.rank(), 0, 3);
      const auto state = optimizer.consolidated_state_dict(1);
      if (world.rank() != 1) {
        EXPECT_TRUE(state.is_none()) << state;
        return;
      }
      expect_states_equal(state, state_dict(theirs));
      EXPECT_EQ(state["param_groups"][0]["param_names"], Value::list({"table", "kernel", "bias", "scale", "narrow"}));
    });
}

/// Trains on `before` ranks, then goes on with `after`, every rank of which gets the inputs of rank 0, so that the
/// number of ranks, a power of two, makes no difference.
void expect_resharded_to_go_on(int before, int after) {
  Value state;
  std::vector<torch::Tensor> values, expected;
  run_threads(before, [&](ProcessGroup world) {
    Lopsided model;
    DistributedDataParallel ddp(model, world);
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp.parameters(), world, AdamWOptions(0.01));
    train(ddp, optimizer, 0, 0, 3);
    auto saved = optimizer.consolidated_state_dict();
    if (world.rank() == 0) {
      state = std::move(saved);
      for (const auto& parameter : ddp.parameters()) values.push_back(parameter.detach().clone());
    }
    train(ddp, optimizer, 0, 3, 6);
    if (world.rank() == 0)
      for (const auto& parameter : ddp.parameters()) expected.push_back(parameter.detach().clone());
  });
  run_threads(after, [&](ProcessGroup world) {
    Lopsided model;
    for (size_t i = 0; i < values.size(); ++i) model->parameters()[i].set_data(values[i].clone());
    DistributedDataParallel ddp(model, world);
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp.parameters(), world, AdamWOptions(99));
    optimizer.load_state_dict(state);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01);
    train(ddp, optimizer, 0, 3, 6);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(relative_difference(ddp.parameters()[i], expected[i]), i == kNarrow ? 1e-6 : 1e-12)
          << "parameter " << i << ", " << before << " ranks to " << after;
  });
}

TEST(ZeroRedundancyOptimizer, LoadsTheStateOfAnyNumberOfRanks) {
  for (int before : {1, 2, 3})
    for (int after : {1, 2, 4}) expect_resharded_to_go_on(before, after);
}

TEST(ZeroRedundancyOptimizer, GoesOnFromAPlainOptimizersState) {
  run_threads(2, [&](ProcessGroup world) {
    Lopsided model, other;
    DistributedDataParallel plain(model, world), sharded(other, world);
    AdamW theirs(plain.parameters(), AdamWOptions(0.01));
    ZeroRedundancyOptimizer<AdamW> optimizer(sharded.parameters(), world, AdamWOptions(0.5));
    train(plain, theirs, world.rank(), 0, 3);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < plain.parameters().size(); ++i) sharded.parameters()[i].copy_(plain.parameters()[i]);
    }
    optimizer.load_state_dict(state_dict(theirs));
    train(plain, theirs, world.rank(), 3, 6);
    train(sharded, optimizer, world.rank(), 3, 6);
    expect_equal(sharded.parameters(), plain.parameters(), 1e-12, "from a plain one");
  });
}

// --- inputs of different lengths

TEST(ZeroRedundancyOptimizer, JoinsWithRanksThatHaveNoInputsLeft) {
  for (const auto& batches : std::vector<std::vector<int>>{{3, 5}, {5, 3}, {0, 4}, {2, 6, 4}}) {
    const int last = *std::max_element(batches.begin(), batches.end());
    Lopsided alone;
    AdamW theirs(alone->parameters(), AdamWOptions(0.01));
    for (int step = 0; step < last; ++step) {
      theirs.zero_grad();
      auto loss = torch::zeros({}, torch::kDouble);
      for (size_t rank = 0; rank < batches.size(); ++rank)
        if (step < batches[rank]) loss = loss + alone(input_of(10 * step + static_cast<int>(rank))).mean();
      (loss / static_cast<double>(batches.size())).backward();
      theirs.step();
    }
    run_threads(static_cast<int>(batches.size()), [&](ProcessGroup world) {
      Lopsided model;
      DistributedDataParallel ddp(model, world);
      ZeroRedundancyOptimizer<AdamW> optimizer(ddp.parameters(), world, AdamWOptions(0.01));
      join({&ddp, &optimizer}, [&] { train(ddp, optimizer, world.rank(), 0, batches[world.rank()]); });
      for (size_t i = 0; i < ddp.parameters().size(); ++i)
        EXPECT_LE(relative_difference(ddp.parameters()[i], alone->parameters()[i]), i == kNarrow ? 1e-6 : 1e-10)
            << "parameter " << i << " with " << batches;
      expect_error<UsageError>([&] { join({&optimizer, &ddp}, [] {}); }, "join({&ddp, &optimizer}");
    });
  }
}

/// Two heads, of which an input uses one.
struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    first = register_module("first", torch::nn::Linear(6, 3));
    second = register_module("second", torch::nn::Linear(6, 3));
    to(torch::kDouble);
    fill_parameters(*this, 5);
  }
  torch::Tensor forward(torch::Tensor x, bool is_first) { return (is_first ? first : second)(x.to(torch::kDouble)); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(TwoHeads);

/// What zero_grad() does: gradients become none, or zero.
void forget(const std::vector<torch::Tensor>& parameters, bool has_zeros) {
  if (!has_zeros) return zero(parameters);
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) parameter.mutable_grad().zero_();
}

/// The loop of ranks that all have inputs for so many steps, of which others may have fewer: the head changes, and so
/// does the learning rate, and gradients are clipped.
template <class Model>
void train_heads(Model& model, Optimizer& optimizer, int steps, bool has_zeros,
                 const std::function<torch::Tensor(int)>& loss) {
  for (int step = 0; step < steps; ++step) {
    forget(model.parameters(), has_zeros);
    loss(step).backward();
    optimizer.param_groups()[0].options().set_lr(0.1 / (step + 1));
    optimizer.step();
  }
}

void expect_to_step_without_inputs(bool has_zeros) {
  const std::vector<int> batches{2, 6};
  TwoHeads alone;
  AdamW theirs(alone->parameters(), AdamWOptions(0.1));
  auto uses_first = [](int step) { return step % 3 == 0; };
  for (int step = 0; step < 6; ++step) {
    forget(alone->parameters(), has_zeros);
    auto loss = torch::zeros({}, torch::kDouble);
    for (int rank = 0; rank < 2; ++rank)
      if (step < batches[rank]) loss = loss + alone(input_of(10 * step + rank), uses_first(step)).square().mean();
    (loss / 2).backward();
    clip_grad_norm_(alone->parameters(), 0.05);
    theirs.param_groups()[0].options().set_lr(0.1 / (step + 1));
    theirs.step();
  }
  run_threads(2, [&](ProcessGroup world) {
    TwoHeads model;
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true});
    ZeroRedundancyOptimizer<AdamW> optimizer(ddp.parameters(), world, AdamWOptions(0.1),
                                             {.before_step = [&] { clip_grad_norm_(ddp.parameters(), 0.05); }});
    join({&ddp, &optimizer}, [&] {
      train_heads(*model, optimizer, batches[world.rank()], has_zeros,
                  [&](int step) { return ddp(input_of(10 * step + world.rank()), uses_first(step)).square().mean(); });
    });
    expect_equal(ddp.parameters(), alone->parameters(), 1e-10, "two heads");
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 0.1 / 6);
  });
}

TEST(ZeroRedundancyOptimizer, ARankWithoutInputsStepsAsTheOthersDo) {
  for (bool has_zeros : {false, true}) expect_to_step_without_inputs(has_zeros);
}

// --- what is wrong

TEST(ZeroRedundancyOptimizer, SaysWhatIsWrong) {
  run_threads(2, [&](ProcessGroup world) {
    using Zero = ZeroRedundancyOptimizer<AdamW>;
    Lopsided model;
    expect_error<UsageError>([&] { Zero(std::vector<torch::Tensor>{}, world, AdamWOptions()); }, "no parameters");
    expect_error<UsageError>(
        [&] {
          Zero({model->table, model->bias, model->table}, world, AdamWOptions());
        },
        "rank ", "parameter 2", "twice");
    const std::vector<std::pair<std::string, torch::Tensor>> elsewhere{
        {"far", torch::ones({2}, torch::device(torch::kMeta))}};
    expect_error<UsageError>([&] { Zero(elsewhere, world, AdamWOptions()); }, "parameter 'far'", "meta", "cpu");
    const auto mine = torch::ones({2 + world.rank()});
    expect_error<MismatchError>(
        [&] {
          Zero({model->bias, mine}, world, AdamWOptions());
        },
        "parameter 1", "[2]", "[3]", "on rank 0", "on rank 1");
    expect_error<MismatchError>(
        [&] {
          Zero(world.rank() == 0 ? std::vector{model->bias} : std::vector{model->bias, mine}, world, AdamWOptions());
        },
        "there are 1 parameters", "[3]");

    const auto alone = world.rank() == 0 ? torch::ones({2}, torch::device(torch::kMeta)) : torch::ones({2});
    expect_error<UsageError>([&] { Zero({model->bias, alone}, world, AdamWOptions()); }, "on rank 0, parameter 1");
    const auto square = world.rank() == 0 ? torch::ones({3, 3}) : torch::ones({3, 3}).t();
    expect_error<MismatchError>([&] { Zero({square}, world, AdamWOptions()); }, "strides [3, 1]", "strides [1, 3]",
                                "the same model");

    Zero optimizer(model->parameters(), world, AdamWOptions());
    std::stringstream archive;
    expect_error<UsageError>([&] { torch::save(optimizer, archive); }, "consolidated_state_dict()");
    expect_error<UsageError>([&] { optimizer.load_state_dict({}); }, "None is not the state of an optimizer",
                             "rank dst");
    const auto nothing = Value::dict({{"state", Value::dict()}, {"param_groups", Value::list()}});
    expect_error<UsageError>([&] { optimizer.load_state_dict(nothing); }, "0 parameter groups", "has 1");
    model->bias.set_data(model->bias.to(torch::kFloat));
    expect_error<UsageError>([&] { optimizer.step(); }, "rank ", "parameter 2", "has become [4] Float on cpu");
  });
  run_threads(1, [&](ProcessGroup world) {
    std::vector<std::pair<std::string, torch::Tensor>> named{{"a", torch::ones({2})}, {"b", torch::ones({2})}};
    ZeroRedundancyOptimizer<AdamW> first(named, world, AdamWOptions());
    std::swap(named[0], named[1]);
    ZeroRedundancyOptimizer<AdamW> second(named, world, AdamWOptions());
    expect_error<UsageError>([&] { second.load_state_dict(first.consolidated_state_dict()); }, "'b' here",
                             "'a' in the state");
  });
  run_threads(2, [&](ProcessGroup world) {
    Lopsided model;
    ZeroRedundancyOptimizer<AdamW> optimizer(model->parameters(), world, AdamWOptions());
    optimizer.add_param_group(std::vector<torch::Tensor>{torch::ones({2})});
    expect_error<UsageError>([&] { optimizer.step(); }, "constructed with 5 parameters and has 6");
    const auto others = world.new_group({0});
    if (world.rank() == 1)
      expect_error<UsageError>([&] { ZeroRedundancyOptimizer<AdamW>(model->parameters(), others, AdamWOptions()); },
                               "not in group world/1");
  });
}

TEST(ZeroRedundancyOptimizer, NamesAGradientThatIsNotAveraged) {
  for (bool is_shared : {false, true})
    run_threads(2,
                [&](ProcessGroup world) {
                  Lopsided model;
                  DistributedDataParallel ddp(model, world, {.ignore = {"kernel"}});
                  ZeroRedundancyOptimizer<SGD> optimizer(ddp.named_parameters(), world, SGDOptions(0.1),
                                                         {.share_parameters = is_shared});
                  const auto before = model->table.detach().clone();
                  ddp(input_of(world.rank())).mean().backward();
                  for (int i = 0; i < 2; ++i)
                    expect_error<MismatchError>([&] { optimizer.step(); },
                                                "the gradient of parameter 'kernel' has norm", "on rank 0, norm ",
                                                "on rank 1, ", "option ignore");
                  EXPECT_TRUE(torch::equal(model->table, before)) << "no step was made";

                  model->kernel.mutable_grad() = torch::ones_like(model->kernel) * (1 + 1e-6 * world.rank());
                  optimizer.step();  // rounding is no difference
                  EXPECT_FALSE(torch::equal(model->table, before));
                },
                {.backend = "shm"});
}

TEST(ZeroRedundancyOptimizer, NamesAParameterThatDiffersBetweenRanks) {
  run_threads(2, [&](ProcessGroup world) {
    Lopsided model;
    ZeroRedundancyOptimizer<SGD> optimizer({{"table", model->table}, {"bias", model->bias}}, world, SGDOptions(0.1));
    if (world.rank() == 1) {
      const torch::NoGradGuard no_grad;
      model->bias.neg_();  // has the same norm
    }
    expect_error<MismatchError>([&] { optimizer.step(); }, "ZeroRedundancyOptimizer: parameter 'bias' has norm",
                                "wrap the model in DistributedDataParallel, which copies rank 0's");
  });
}

TEST(ZeroRedundancyOptimizer, AcceptsGradientsOfHalfPrecisionThatAreRoundedDifferently) {
  run_threads(2, [&](ProcessGroup world) {
    const auto parameter = torch::ones({1 << 21}, at::kBFloat16).requires_grad_();
    ZeroRedundancyOptimizer<FusedSGD> optimizer({parameter}, world, SGDOptions(0.1));
    parameter.mutable_grad() = torch::full_like(parameter, world.rank() == 0 ? 1.0 : 1.0 + 1.0 / 128);
    EXPECT_NO_THROW(optimizer.step());
  });
}

TEST(ZeroRedundancyOptimizer, ComparesGradientsUntilTheyDoNotOverflow) {
  run_threads(2, [&](ProcessGroup world) {
    const auto parameter = torch::ones({100}).requires_grad_();
    ZeroRedundancyOptimizer<FusedSGD> optimizer({parameter}, world, SGDOptions(0.1));
    parameter.mutable_grad() = torch::full({100}, std::numeric_limits<float>::infinity());
    optimizer.step_unless(torch::ones({1}));
    parameter.mutable_grad() = torch::full({100}, 1.0F + static_cast<float>(world.rank()));
    expect_error<MismatchError>([&] { optimizer.step(); }, "the gradient of parameter 0 has norm 10 and sum 100 on",
                                "norm 20 and sum 200 on rank 1");
    if (world.rank() == 1) parameter.mutable_grad().fill_(std::numeric_limits<float>::quiet_NaN());
    expect_error<MismatchError>([&] { optimizer.step(); }, "sum nan on rank 1");
  });
}

TEST(ZeroRedundancyOptimizer, AStepThatBrokeOffLeavesNothingToSave) {
  std::latch have_stepped(2);
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    Lopsided model;
    ZeroRedundancyOptimizer<AdamW> optimizer(model->parameters(), world, AdamWOptions());
    for (const auto& parameter : model->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    optimizer.step();
    have_stepped.arrive_and_wait();
    if (world.rank() == 0) world.abort("a test");
    EXPECT_THROW(optimizer.step(), PeerError);
    expect_error<UsageError>([&] { optimizer.consolidated_state_dict(); }, "rank ", "did not finish", "checkpoint");
  });
}

}  // namespace
}  // namespace lockstep
