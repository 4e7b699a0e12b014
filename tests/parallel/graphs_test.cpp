// Whatever graph backward runs through: recomputed segments, shared parameters, several outputs, partial backward
// passes.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

/// Forward without a graph; backward computes the segment again and runs backward inside of backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Segment = std::function<torch::Tensor(torch::Tensor)>;

  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, torch::Tensor /*trained*/,
                               Segment* segment) {
    context->save_for_backward({x});
    context->saved_data["segment"] = reinterpret_cast<int64_t>(segment);
    torch::NoGradGuard no_grad;
    return (*segment)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    auto& segment = *reinterpret_cast<Segment*>(context->saved_data["segment"].toInt());
    torch::Tensor y;
    {
      torch::AutoGradMode grad_mode(true);
      y = segment(x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), torch::Tensor(), torch::Tensor()};
  }
};

/// An Mlp of which each of the three layers may be recomputed in backward.
struct RecomputingImpl : torch::nn::Module {
  explicit RecomputingImpl(std::vector<bool> which) : which_(std::move(which)) {
    inner = register_module("inner", Mlp());
    segments_ = {[this](torch::Tensor x) { return torch::tanh(inner->first(x)); },
                 [this](torch::Tensor x) { return torch::tanh(inner->second(x)); },
                 [this](torch::Tensor x) { return inner->third(x); }};
  }
  torch::Tensor forward(torch::Tensor x) {
    auto trained = torch::ones({1}).requires_grad_();  // lets autograd come here though x needs no gradient
    for (size_t i = 0; i < 3; ++i) x = which_[i] ? Recomputed::apply(x, trained, &segments_[i]) : segments_[i](x);
    return x;
  }
  Mlp inner{nullptr};

 private:
  std::vector<bool> which_;
  std::vector<Recomputed::Segment> segments_;
};
TORCH_MODULE(Recomputing);

const std::vector<std::vector<bool>> kSegments{
    {true, true, true}, {true, false, false}, {false, true, false}, {false, false, true}, {false, true, true}};

TEST(Graphs, RecomputedSegmentsAreAveraged) {
  const auto expected = mean_gradients(2);
  for (const auto& which : kSegments) {
    for (bool static_graph : {false, true}) {
      run_threads(2, [&](ProcessGroup world) {
        Recomputing model(which);
        fill_parameters(*model, 1);
        DistributedDataParallel ddp(model, world,
                                    {.static_graph = static_graph, .buckets = {.first_bytes = 100, .cap_bytes = 300}});
        for (int step = 0; step < 3; ++step) {
          model->zero_grad();
          ddp(input_of(world.rank())).square().sum().backward();
          expect_gradients(*model, expected);
        }
      });
    }
  }
}

TEST(Graphs, RecomputedSegmentsAreAveragedThroughTheModuleItself) {
  const auto expected = mean_gradients(2);
  for (const auto& which : kSegments) {
    run_threads(2, [&](ProcessGroup world) {
      Recomputing model(which);
      fill_parameters(*model, 1);
      DistributedDataParallel ddp(model, world);
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        model(input_of(world.rank())).square().sum().backward();
        expect_gradients(*model, expected);
      }
    });
  }
}

/// One layer in two recomputed segments: it gets two gradients in each backward.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() {
    layer = register_module("layer", torch::nn::Linear(6, 6));
    segment_ = [this](torch::Tensor x) { return torch::tanh(layer(x)); };
  }
  torch::Tensor forward(torch::Tensor x, bool recompute) {
    auto trained = torch::ones({1}).requires_grad_();
    for (int i = 0; i < 2; ++i) x = recompute ? Recomputed::apply(x, trained, &segment_) : segment_(x);
    return x;
  }
  torch::nn::Linear layer{nullptr};

 private:
  Recomputed::Segment segment_;
};
TORCH_MODULE(Twice);

torch::Tensor mean_gradient_of_twice(int size) {
  torch::Tensor sum = torch::zeros({6, 6});
  for (int rank = 0; rank < size; ++rank) {
    Twice model;
    fill_parameters(*model, 1);
    model(input_of(rank), false).square().sum().backward();
    sum += model->layer->weight.grad();
  }
  return sum / size;
}

TEST(Graphs, AModuleUsedTwiceInOneForwardIsAveragedOnce) {
  run_threads(2, [&](ProcessGroup world) {
    Twice model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world);
    ddp(input_of(world.rank()), false).square().sum().backward();
    EXPECT_LE(relative_difference(model->layer->weight.grad(), mean_gradient_of_twice(2)), 1e-6);
  });
}

TEST(Graphs, AStaticGraphMayGiveAParameterSeveralGradients) {
  run_threads(2, [&](ProcessGroup world) {
    Twice model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world, {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank()), true).square().sum().backward();
      EXPECT_LE(relative_difference(model->layer->weight.grad(), mean_gradient_of_twice(2)), 1e-6);
    }
  });
}

TEST(Graphs, OtherwiseASecondGradientInOneBackwardIsRefusedByName) {
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    Twice model;
    DistributedDataParallel ddp(model, world);
    expect_error<UsageError>([&] { ddp(input_of(world.rank()), true).square().sum().backward(); }, "'layer.",
                             "second gradient", "static_graph = true", "no_sync");
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)));
    second = register_parameter("second", first->weight);
  }
  torch::Tensor forward(torch::Tensor x) { return torch::linear(torch::tanh(first(x)), second); }
  torch::nn::Linear first{nullptr};
  torch::Tensor second;
};
TORCH_MODULE(Tied);

TEST(Graphs, TiedWeightsAreOneParameter) {
  auto fill = [](TiedImpl& model) {
    torch::NoGradGuard no_grad;
    model.first->weight.copy_(torch::randn({6, 6}, at::detail::createCPUGenerator(3)));
  };
  torch::Tensor expected = torch::zeros({6, 6});
  for (int rank = 0; rank < 2; ++rank) {
    Tied alone;
    fill(*alone);
    alone(input_of(rank)).square().sum().backward();
    expected += alone->first->weight.grad() / 2;
  }
  run_threads(2, [&](ProcessGroup world) {
    Tied model;
    fill(*model);
    DistributedDataParallel ddp(model, world);
    ASSERT_EQ(ddp.parameters().size(), 1u) << "an optimizer would step twice";
    EXPECT_EQ(ddp.named_parameters()[0].first, "second") << "the first of its names";
    ddp(input_of(world.rank())).square().sum().backward();
    EXPECT_LE(relative_difference(model->first->weight.grad(), expected), 1e-6);
  });
}

struct Result {
  torch::Tensor value;
  std::string note;
};

struct ManyWaysImpl : torch::nn::Module {
  ManyWaysImpl() { layer = register_module("layer", torch::nn::Linear(6, 4)); }
  Result forward(const torch::Tensor& x, std::string note) { return {layer(x), std::move(note)}; }
  std::map<std::string, std::vector<torch::Tensor>> forward(const std::vector<torch::Tensor>& xs) {
    return {{"all", {layer(xs.at(0)), layer(xs.at(1))}}};
  }
  torch::Tensor& forward(torch::Tensor& x, std::unique_ptr<int> times) {
    for (int i = 0; i < *times; ++i) x = x + 1;
    return x;
  }
  void forward() { ++calls; }
  torch::nn::Linear layer{nullptr};
  int calls = 0;
};

TEST(Graphs, ForwardTakesAndReturnsWhateverTheModuleDoes) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = std::make_shared<ManyWaysImpl>();
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world);
    auto result = ddp(input_of(world.rank()), "named");
    EXPECT_EQ(result.note, "named");
    result.value.sum().backward();
    auto maps = ddp(std::vector<torch::Tensor>{input_of(0), input_of(1)});
    (maps["all"][0] + maps["all"][1]).sum().backward();
    auto x = torch::zeros({1});
    torch::Tensor same = ddp(x, std::make_unique<int>(3));
    EXPECT_TRUE(same.is_same(x)) << "a returned reference is copied, the tensor is not";
    EXPECT_EQ(x.item<float>(), 3);
    ddp();
    EXPECT_EQ(model->calls, 1);
  });
}

TEST(Graphs, AnUndefinedGradientIsNone) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true});
    torch::optim::AdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    auto loss_of = [&] { return (Stop::apply(ddp(input_of(world.rank()))) + model->third(torch::ones({12}))).sum(); };
    loss_of().backward();
    EXPECT_FALSE(model->first->weight.grad().defined()) << "on no rank was there a gradient";
    EXPECT_TRUE(model->third->weight.grad().defined());
    optimizer.step();
    EXPECT_TRUE(torch::equal(model->first->weight, filled_mlp()->first->weight)) << "nothing to decay by";
  });
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    expect_error<UsageError>(
        [&] { (Stop::apply(ddp(input_of(world.rank()))) + model->third(torch::ones({12}))).sum().backward(); },
        "no gradient on this rank", "'first.weight'", "find_unused_parameters");
  });
}

TEST(Graphs, ABackwardWithoutAnyGradientNamesTheRankOnce) {
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    const auto what = error_of<UsageError>([&] { Stop::apply(ddp(input_of(world.rank()))).sum().backward(); });
    EXPECT_THAT(what,
                testing::StartsWith("rank " + std::to_string(world.rank()) + ": backward gave no gradient to any"));
  });
}

/// Three layers. Some ranks leave out the last one; an auxiliary loss may be kept aside.
struct PartlyUsedImpl : torch::nn::Module {
  PartlyUsedImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    second = register_module("second", torch::nn::Linear(4, 4));
    third = register_module("third", torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(second(torch::tanh(first(x))));
    if (keeps_aside) aside = third(x).sum();
    return uses_third ? third(x) : x;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  bool uses_third = true, keeps_aside = false;
  torch::Tensor aside;
};
TORCH_MODULE(PartlyUsed);

constexpr BucketLimits kBucketPerLayer{.first_bytes = 100, .cap_bytes = 100};

TEST(Graphs, BucketsOfUnusedParametersDoNotDelayOthers) {
  run_threads(2, [&](ProcessGroup world) {
    PartlyUsed model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true, .buckets = kBucketPerLayer});
    std::vector<std::string> events;
    ddp.register_comm_hook([&, average = all_reduce_hook()](const GradientBucket& bucket, const ProcessGroup& group) {
      events.push_back("bucket");
      return average(bucket, group);
    });
    model->first->weight.register_hook([&](const torch::Tensor&) { events.push_back("first layer"); });
    for (int step = 0; step < 4; ++step) {
      model->uses_third = step == 0 || world.rank() == 0;  // the third layer's bucket is the first one
      events.clear();
      model->zero_grad();
      ddp(torch::ones({2, 3})).sum().backward();
      const auto reached = std::find(events.begin(), events.end(), "first layer") - events.begin();
      EXPECT_GE(reached, step > 0 ? 2 : 0) << "the buckets of the third and the second layer";
      EXPECT_TRUE(model->third->weight.grad().defined());
    }
    ddp.check_replicas();
  });
}

TEST(Graphs, ParametersThatOnlyALossKeptAsideReachesAreAveraged) {
  run_threads(2, [&](ProcessGroup world) {
    PartlyUsed model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true, .buckets = kBucketPerLayer});
    model->uses_third = false;
    model->keeps_aside = true;
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const auto output = ddp(torch::full({2, 3}, world.rank() + 1.0));
      (output.sum() + model->aside).backward();
      const auto bias = model->third->bias.grad();
      EXPECT_TRUE(torch::equal(bias, torch::full({4}, 2.0))) << bias;  // two rows on each rank
    }
    ddp.check_replicas();
  });
}

TEST(Graphs, ALossKeptAsideForTheFirstTimeInALaterStepIsRefusedByName) {
  run_threads(1, [&](ProcessGroup world) {
    PartlyUsed model;
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true, .buckets = kBucketPerLayer});
    model->uses_third = false;
    for (int step = 0; step < 2; ++step) ddp(torch::ones({2, 3})).sum().backward();
    model->keeps_aside = true;
    const auto output = ddp(torch::ones({2, 3}));
    expect_error<UsageError>([&] { (output.sum() + model->aside).backward(); }, "rank 0", "'third.",
                             "no tensor that forward returned", "return from forward");
  });
}

TEST(Graphs, ARankWhoseLossReachesNoParameterStillTakesPart) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.find_unused_parameters = true});
    auto out = ddp(input_of(world.rank()));
    auto loss = out.square().sum();
    if (world.rank() == 1) loss = Stop::apply(out).sum();
    loss.backward();
    Mlp alone = filled_mlp();
    alone(input_of(0)).square().sum().backward();
    EXPECT_LE(relative_difference(model->first->weight.grad(), alone->first->weight.grad() / 2), 1e-6);
  });
}

TEST(Graphs, AGradientPenaltyIsNotTakenForABackward) {
  auto loss_of = [](auto& model, int rank) {
    auto x = input_of(rank).requires_grad_();
    auto y = model(x);
    auto slope = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];  // nothing is averaged here
    return y.square().sum() + slope.square().sum();
  };
  torch::Tensor expected = torch::zeros({16, 6});
  for (int rank = 0; rank < 2; ++rank) {
    auto alone = filled_mlp();
    loss_of(alone, rank).backward();
    expected += alone->first->weight.grad() / 2;
  }
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    // The penalty does not depend on the last bias, so that only the outer backward can tell the end.
    DistributedDataParallel ddp(model, world);
    loss_of(ddp, world.rank()).backward();
    EXPECT_LE(relative_difference(model->first->weight.grad(), expected), 1e-6);
  });
}

TEST(Graphs, OneBackwardMayRunThroughSeveralForwardsOfAModelWithBuffers) {
  run_threads(3, [&](ProcessGroup world) {
    ConvNet model;
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world);
    for (int step = 0; step < 2; ++step) {
      auto image = torch::randn({2, 1, 6, 6}, at::detail::createCPUGenerator(world.rank()));
      (ddp(image).sum() + ddp(image * 2).sum()).backward();
    }
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 4);
  });
}

TEST(Graphs, SeveralModelsTrainOnSeveralGroupsAtOnce) {
  run_threads(4, [&](ProcessGroup world) {
    auto mine = world.new_subgroups(2);
    auto model = filled_mlp(), other = filled_mlp();
    DistributedDataParallel in_world(model, world);
    DistributedDataParallel in_half(other, mine);
    auto x = input_of(world.rank());
    (in_world(x).square().sum() + in_half(x).square().sum()).backward();
    expect_gradients(*model, mean_gradients(4));
    auto halves = other->first->weight.grad().clone();
    mine.all_reduce(halves, ReduceOp::kMax);
    EXPECT_TRUE(torch::equal(halves, other->first->weight.grad())) << "equal in each half";
    world.all_reduce(halves, ReduceOp::kAvg);
    EXPECT_LE(relative_difference(halves, model->first->weight.grad()), 1e-6) << "the halves' mean is the world's";
  });
}

TEST(Graphs, GradientsInHalfPrecisionAreAveragedInFloat32) {
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    run_threads(3, [&](ProcessGroup world) {
      auto model = std::make_shared<torch::nn::LinearImpl>(4, 4);
      model->to(dtype);
      DistributedDataParallel ddp(model, world);
      // The graph is one that the CPU computes in any dtype.
      ((model->weight * (world.rank() + 1.0)).sum() + (model->bias * 30000.0).sum()).backward();
      EXPECT_TRUE(torch::equal(model->weight.grad(), torch::full({4, 4}, 2.0, dtype)));
      EXPECT_TRUE(torch::equal(model->bias.grad(), torch::full({4}, 30000.0, dtype))) << "90000 is no half";
    });
  }
}

}  // namespace
}  // namespace lockstep
