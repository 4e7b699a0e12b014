// A rank of benchmarks/two_hosts, which makes the hosts and says what is measured: two_hosts_rank FOLDER
//
// The same all-reduce by the backends hierarchical and gloo and by Gloo's own ring, alternating. Ranks are released
// together before every sample, which is the slowest rank's time; buffers are rewritten and results checked. What
// leaves a host is read from the statistics of its interface, "cable": headers, acknowledgements and a barrier
// included.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <lockstep/lockstep.h>

namespace {

using Clock = std::chrono::steady_clock;
using lockstep::ProcessGroup;

constexpr const char* kInterface = "cable";
constexpr double kHosts = 2;

struct Sample {
  double ms = 0;
  double bytes_left = 0;  // one host, on its interface
};

struct Side {
  std::string name;
  std::function<void(const at::Tensor&)> all_reduce;
  std::vector<Sample> samples{};
};

double bytes_sent() {
  double bytes = 0;
  std::ifstream(std::string("/sys/class/net/") + kInterface + "/statistics/tx_bytes") >> bytes;
  return bytes;
}

/// Whole numbers, so that the sum is the same in every order.
at::Tensor pattern(int64_t elements) {
  return at::arange(elements, at::kFloat).remainder_(1000);
}

Sample sample(const ProcessGroup& world, const Side& side, const at::Tensor& unit, const at::Tensor& tensor) {
  tensor.copy_(unit).mul_(world.rank() + 1);
  world.barrier();
  double sent = bytes_sent();
  auto begin = Clock::now();
  side.all_reduce(tensor);
  double took = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  world.barrier();
  auto most = at::tensor({took, bytes_sent() - sent}, at::kDouble);
  world.all_reduce(most, lockstep::ReduceOp::kMax);
  if (!at::equal(tensor, unit * (world.size() * (world.size() + 1) / 2)))
    throw std::runtime_error("rank " + std::to_string(world.rank()) + ": wrong result of " + side.name);
  return {most[0].item<double>(), most[1].item<double>()};
}

double percentile(const Side& side, double Sample::*value, double part) {
  std::vector<double> values;
  for (const auto& sample : side.samples) values.push_back(sample.*value);
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1) + 0.5)];
}

void print(int64_t bytes, const std::vector<Side>& sides) {
  const double least = 2 * static_cast<double>(bytes) * (kHosts - 1) / kHosts;
  const double ours = percentile(sides[0], &Sample::ms, 0.5);
  for (const auto& side : sides) {
    double ms = percentile(side, &Sample::ms, 0.5);
    double left = percentile(side, &Sample::bytes_left, 0.5);
    std::printf("%10lld  %-12s  %9.3f  %9.3f %9.3f  %12.0f  %7.2f  %6.2f\n", static_cast<long long>(bytes),
                side.name.c_str(), ms, percentile(side, &Sample::ms, 0.1), percentile(side, &Sample::ms, 0.9), left,
                left / least, ms / ours);
  }
  std::fflush(stdout);
}

void compare(const ProcessGroup& world, std::vector<Side> sides) {
  if (world.rank() == 0)
    std::printf("%10s  %-12s  %9s  %9s %9s  %12s  %7s  %6s\n", "bytes", "side", "ms", "p10", "p90", "left a host",
                "/ least", "ratio");
  for (int64_t bytes : {25 << 20, 1 << 20, 4 << 10}) {
    auto unit = pattern(bytes / 4);
    auto tensor = at::empty_like(unit);
    for (auto& side : sides) side.samples.clear();
    const int rounds = bytes > (4 << 20) ? 11 : 51;
    for (int round = -2; round < rounds; ++round)  // two to warm up
      for (auto& side : sides) {
        auto taken = sample(world, side, unit, tensor);
        if (round >= 0) side.samples.push_back(taken);
      }
    if (world.rank() == 0) print(bytes, sides);
  }
}

std::shared_ptr<gloo::Context> connect_ring(const ProcessGroup& world, const std::string& folder) {
  gloo::transport::tcp::attr attributes;
  attributes.iface = kInterface;
  gloo::rendezvous::FileStore store(folder);
  auto device = gloo::transport::tcp::CreateDevice(attributes);
  auto ring = std::make_shared<gloo::rendezvous::Context>(world.rank(), world.size());
  ring->connectFullMesh(store, device);
  return ring;
}

void reduce_in_ring(const std::shared_ptr<gloo::Context>& ring, const at::Tensor& tensor) {
  gloo::AllreduceOptions options(ring);
  options.setOutput(tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel()));
  void (*add)(void*, const void*, const void*, size_t) = &gloo::sum<float>;
  options.setReduceFunction(add);
  gloo::allreduce(options);
}

void measure(const std::string& folder) {
  auto world = lockstep::init_process_group({.backend = "gloo"});
  auto hierarchy = world.new_group({0, 1, 2, 3}, {.backend = "hierarchical"});
  auto ring = connect_ring(world, folder);
  compare(world, {{"hierarchical", [&](const at::Tensor& tensor) { hierarchy.all_reduce(tensor); }},
                  {"gloo", [&](const at::Tensor& tensor) { world.all_reduce(tensor); }},
                  {"Gloo's ring", [&](const at::Tensor& tensor) { reduce_in_ring(ring, tensor); }}});
  world.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: two_hosts_rank FOLDER, started by benchmarks/two_hosts\n");
    return 2;
  }
  at::set_num_threads(1);
  try {
    measure(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
