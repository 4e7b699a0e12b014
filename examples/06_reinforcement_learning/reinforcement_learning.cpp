// Reinforcement learning: the ranks train one policy by PPO. Each rank has 32 carts of its own, with the physics of
// Gym's CartPole-v1. The return of an episode is the number of steps until the pole falls, at most 500. The carts are
// rows of tensors on the rank's device, so that a GPU simulates them without waiting for the host.
//
//   lockstep run -n 2 build/reinforcement_learning [ITERATIONS]

#include <cstdlib>
#include <iostream>
#include <numbers>
#include <utility>
#include <vector>

#include <lockstep/lockstep.h>

namespace {

using torch::Tensor;

constexpr int64_t kCarts = 32, kSteps = 64;                    // of a rank, in an iteration
constexpr int64_t kUpdates = 16, kRows = kCarts * kSteps / 4;  // updates of an iteration, each with some of its rows
constexpr double kDiscount = 0.99, kLambda = 0.95;             // of generalized advantage estimation

struct CartPoles {
  Tensor states;  // [carts, 4]: position, velocity, angle, angular velocity
  Tensor steps;   // [carts]: in the episode so far

  void reset(const Tensor& which) {
    states = torch::where(which.unsqueeze(1), 0.1 * torch::rand_like(states) - 0.05, states);
    steps = steps.masked_fill(which, 0);
  }
  /// Pushes each cart to the left (0) or to the right (1) for 0.02 s.
  void push(const Tensor& actions) {
    const auto angle = states.select(1, 2), spin = states.select(1, 3), sine = angle.sin(), cosine = angle.cos();
    const auto force = (20 * actions - 10 + 0.05 * spin.square() * sine) / 1.1;
    const auto turn = (9.8 * sine - cosine * force) / (0.5 * (4.0 / 3 - 0.1 * cosine.square() / 1.1));
    const auto acceleration = force - 0.05 * turn * cosine / 1.1;
    states = states + 0.02 * torch::stack({states.select(1, 1), acceleration, spin, turn}, 1);
    steps = steps + 1;
  }
  Tensor have_fallen() const {
    return (states.select(1, 0).abs() > 2.4).logical_or(states.select(1, 2).abs() > 12 * std::numbers::pi / 180);
  }
};

/// Returns the logarithms of both actions' probabilities, and the states' values: the network has these in hundreds.
std::pair<Tensor, Tensor> predict(auto& net, const Tensor& states) {
  const auto outputs = net.forward(states);
  return {outputs.slice(-1, 0, 2).log_softmax(-1), 100 * outputs.select(-1, 2)};
}

struct Rollout {
  Tensor states, actions, log_probs, advantages, values;  // a row for each step of each cart
};

/// Lets the policy act for kSteps steps. Adds the returns of episodes that end to `returns`.
Rollout play(torch::nn::Sequential& net, CartPoles& carts, lockstep::MeanMetric& returns) {
  torch::NoGradGuard no_grad;
  std::vector<Tensor> states, actions, next_states, fallen, over;
  for (int64_t step = 0; step < kSteps; ++step) {
    states.push_back(carts.states);
    actions.push_back(predict(*net, carts.states).first.exp().multinomial(1));
    carts.push(actions.back().squeeze(1));
    next_states.push_back(carts.states);
    fallen.push_back(carts.have_fallen());
    over.push_back(fallen.back().logical_or(carts.steps == 500));
    returns.add(carts.steps, over.back());
    carts.reset(over.back());
  }
  const auto [log_probs, values] = predict(*net, torch::stack(states));  // [steps, carts, ...]
  const auto next_values = predict(*net, torch::stack(next_states)).second.masked_fill(torch::stack(fallen), 0);
  auto advantages = 1 + kDiscount * next_values - values;  // the reward of a step is 1
  for (int64_t step = kSteps - 2; step >= 0; --step)
    advantages[step] += kDiscount * kLambda * advantages[step + 1].masked_fill(over[step], 0);
  return {torch::cat(states), torch::cat(actions), log_probs.gather(2, torch::stack(actions)).flatten(0, 1),
          advantages.view({-1, 1}), (values + advantages).flatten()};
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t iterations = argc > 1 ? std::atoll(argv[1]) : 60;
  if (iterations < 1) {
    std::cerr << "usage: reinforcement_learning [ITERATIONS]\n";
    return 2;
  }
  auto world = lockstep::init_process_group();
  lockstep::seed_everything(1, world);  // different episodes on each rank
  using torch::nn::Linear, torch::nn::Tanh;
  torch::nn::Sequential net(Linear(4, 64), Tanh(), Linear(64, 64), Tanh(), Linear(64, 3));
  net->to(world.device());
  lockstep::DistributedDataParallel ddp(net, world);
  lockstep::FusedAdam optimizer(ddp.parameters(), torch::optim::AdamOptions(2e-3));
  lockstep::MeanMetric returns(world.device());
  CartPoles carts{torch::zeros({kCarts, 4}, world.device()), torch::zeros({kCarts}, world.device())};
  carts.reset(carts.steps == 0);
  for (int64_t iteration = 1; iteration <= iterations; ++iteration) {
    const auto rollout = play(net, carts, returns);
    auto moments = torch::stack({rollout.advantages.mean(), rollout.advantages.square().mean()});
    world.all_reduce(moments, lockstep::ReduceOp::kAvg);  // advantages are normalized over all ranks
    const auto advantages =
        (rollout.advantages - moments[0]) / (moments[1] - moments[0].square()).clamp_min(1e-8).sqrt();
    for (int64_t update = 0; update < kUpdates; ++update) {
      const auto rows = torch::randperm(kCarts * kSteps, rollout.actions.options()).slice(0, 0, kRows);
      const auto pick = [&](const Tensor& all) { return all.index_select(0, rows); };
      const auto [log_probs, values] = predict(ddp, pick(rollout.states));
      const auto ratio = (log_probs.gather(1, pick(rollout.actions)) - pick(rollout.log_probs)).exp();
      const auto gain = torch::min(ratio * pick(advantages), ratio.clamp(0.8, 1.2) * pick(advantages)).mean();
      const auto error = torch::mse_loss(values, pick(rollout.values));
      const auto entropy = -(log_probs.exp() * log_probs).sum(1).mean();
      optimizer.zero_grad();
      (1e-4 * error - gain - 0.01 * entropy).backward();  // averages the gradients over the ranks
      lockstep::clip_grad_norm_(ddp.parameters(), 0.5);
      optimizer.step();
    }
    if (iteration != 1 && iteration % 10 != 0) continue;
    const double mean_return = returns.compute(world);  // collective
    lockstep::print(world, "iteration ", iteration, "  return ", mean_return);
    returns.reset();
  }
}
