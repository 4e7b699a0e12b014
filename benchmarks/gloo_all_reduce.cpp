// The all-reduce of the backend gloo against Gloo's own ring, in one run: gloo_all_reduce [RANKS [BYTES...]]
//
// Ranks are threads of one process, connected over loopback. They are released together before every sample; a sample
// is the slowest rank's time; the sides alternate. Buffers are rewritten for each sample and results checked.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <ATen/ATen.h>
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#include <lockstep/lockstep.h>

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// The slowest rank's time for one call, in microseconds.
template <class Call>
double sample(const lockstep::ProcessGroup& world, at::Tensor& tensor, Call call) {
  tensor.fill_(world.rank() + 1);
  world.barrier();
  auto begin = Clock::now();
  call();
  double took = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  auto slowest = at::full({1}, took, at::kDouble);
  world.all_reduce(slowest, lockstep::ReduceOp::kMax);
  float expected = static_cast<float>(world.size() * (world.size() + 1)) / 2;
  if (!tensor.eq(expected).all().item<bool>()) {
    std::fprintf(stderr, "rank %d: wrong result\n", world.rank());
    std::exit(1);
  }
  return slowest.item<double>();
}

void compare(const lockstep::ProcessGroup& world, const std::shared_ptr<gloo::Context>& ring,
             const std::vector<int64_t>& sizes) {
  if (world.rank() == 0) std::printf("%12s %12s %12s %8s\n", "bytes", "ours us", "Gloo ring us", "ratio");
  for (int64_t bytes : sizes) {
    auto tensor = at::empty({bytes / 4});
    auto theirs = [&] {
      gloo::AllreduceOptions options(ring);
      options.setOutput(tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel()));
      void (*add)(void*, const void*, const void*, size_t) = &gloo::sum<float>;
      options.setReduceFunction(add);
      gloo::allreduce(options);
    };
    auto ours = [&] { world.all_reduce(tensor); };
    int rounds = bytes > (4 << 20) ? 21 : 201;
    std::vector<double> our_times, their_times;
    for (int round = -3; round < rounds; ++round) {  // three to warm up
      double a = sample(world, tensor, ours);
      double b = sample(world, tensor, theirs);
      if (round < 0) continue;
      our_times.push_back(a);
      their_times.push_back(b);
    }
    double a = median(our_times), b = median(their_times);
    if (world.rank() == 0) std::printf("%12lld %12.1f %12.1f %8.2f\n", static_cast<long long>(bytes), a, b, b / a);
  }
}

}  // namespace

int main(int argc, char** argv) {
  int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  std::vector<int64_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  if (sizes.empty()) sizes = {4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20};
  at::set_num_threads(1);
  gloo::rendezvous::HashStore store;
  lockstep::run_threads(ranks,
                        [&](lockstep::ProcessGroup world) {
                          auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
                          auto ring = std::make_shared<gloo::rendezvous::Context>(world.rank(), world.size());
                          ring->connectFullMesh(store, device);
                          compare(world, ring, sizes);
                          world.barrier();
                        },
                        {.backend = "gloo"});
}
