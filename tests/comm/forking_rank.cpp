#include "comm/forking_rank.h"

#include <optional>
#include <stdexcept>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "support/forked.h"

namespace {

using lockstep::ProcessGroup;

void require(bool is_so, const std::string& what) {
  if (!is_so) throw std::runtime_error(what);
}

void require_refused(const ProcessGroup& world, const std::string& call, const std::function<void()>& make) {
  const auto expected = "was forked from rank " + std::to_string(world.rank()) + "'s process (pid ";
  try {
    make();
  } catch (const lockstep::UsageError& error) {
    return require(std::string(error.what()).find(expected) != std::string::npos, call + " says: " + error.what());
  }
  throw std::runtime_error(call + " was not refused");
}

void train_once(lockstep::DistributedDataParallel<torch::nn::LinearImpl>& ddp) {
  ddp(torch::ones({8, 64})).sum().backward();
}

}  // namespace

void require_refused_in_child(const ProcessGroup& world) {
  const auto tensor = at::ones({1000});
  const auto refused = [&](const char* call, const std::function<void()>& make) { require_refused(world, call, make); };
  refused("all_reduce", [&] { world.all_reduce(tensor); });
  refused("all_reduce_async", [&] { world.all_reduce_async(tensor).wait(); });
  refused("broadcast", [&] { world.broadcast(tensor, 0); });
  refused("send", [&] { world.send(tensor, 1 - world.rank()); });
  refused("recv_async", [&] { world.recv_async(tensor, 1 - world.rank()).wait(); });
  refused("barrier", [&] { world.barrier(); });
  refused("monitored_barrier", [&] { world.monitored_barrier(); });
  refused("broadcast_object", [&] { world.broadcast_object(c10::IValue(1), 0); });
  refused("new_group", [&] { world.new_group({0, 1}); });
  refused("allocate", [&] { world.allocate({4}, at::kFloat); });
  refused("synchronize", [&] { world.synchronize(); });
  refused("abort", [&] { world.abort("no reason"); });
  refused("destroy", [&] { world.destroy(); });
}

void fork_and_go_on(const ProcessGroup& world) {
  static std::optional<ProcessGroup> kept;  // goes when a process exits, a child too
  kept = world;
  const int me = world.rank();
  auto shared = world.allocate({24 << 20}, at::kFloat);  // so large that its memory is given back when it is freed
  shared.fill_(me + 1);
  torch::nn::Linear model(64, 64);
  std::optional<lockstep::DistributedDataParallel<torch::nn::LinearImpl>> ddp(std::in_place, model, world);
  train_once(*ddp);
  auto tensor = at::full({1000}, me + 1.0);
  std::optional<lockstep::Work> work;

  const auto fork_a_child = [&](const std::string& when) {
    const int code = exit_code_of_fork([&] {
      require_refused_in_child(world);
      require_refused(world, "Work::wait", [&] { work->wait(); });
      require_refused(world, "Work::is_done", [&] { work->is_done(); });
      require_refused(world, "DistributedDataParallel", [&] { ddp->sync_parameters_and_buffers(); });
      work.reset();
      ddp.reset();
      shared.reset();
      const auto own = lockstep::init_process_group({.backend = "shm", .rank = 0, .world_size = 1});
      own.all_reduce(own.allocate({1000}, at::kFloat));
    });
    require(code == 0, "a child that was forked " + when +
                           (code == kForkHangs ? " hangs" : " ended with " + std::to_string(code)));
  };
  const auto word = at::ones({1});
  if (me == 0) {
    work = world.all_reduce_async(tensor);  // rank 1 comes when the child is gone
    fork_a_child("during a call");
    world.send(word, 1);
  } else {
    world.recv(word, 0);
    work = world.all_reduce_async(tensor);
  }
  work->wait();
  require(at::equal(tensor, at::full({1000}, 3.0)), "the call that was pending has another result");
  fork_a_child("after a call");
  require(at::equal(shared, at::full_like(shared, me + 1)), "the child changed its parent's memory");
  world.all_reduce(shared);
  require(at::equal(shared, at::full_like(shared, 3)), "a call after the fork has another result");
  train_once(*ddp);
  world.barrier();
  kept.reset();
}
