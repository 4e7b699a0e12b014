#pragma once

#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/process_group.h>

inline void expect_equal(double actual, double expected, const char* what) {
  if (actual != expected) throw std::runtime_error(std::string("wrong result of ") + what);
}

/// One call of a random kind, size and memory on a random group; every rank of a group draws the same.
class MixedCalls {
 public:
  explicit MixedCalls(const lockstep::ProcessGroup& world) {
    groups_.push_back(world);
    for (const auto& ranks : {std::vector<int>{0, 1}, {1, 2}, {0, 1, 2}}) {
      auto group = world.new_group(ranks);
      if (group.contains_me()) groups_.push_back(group);
      is_mine_.push_back(group.contains_me());
    }
  }

  void make_one() {
    unsigned which = random_() % (is_mine_.size() + 1);
    unsigned kind = random_() % 7, shift = random_() % 19, extra = random_();
    bool is_allocated = random_() % 2 == 0;
    int64_t n = 1 + static_cast<int64_t>(extra) % (int64_t{1} << shift);
    if (which > 0 && !is_mine_[which - 1]) return;
    size_t index = which == 0 ? 0 : 1 + std::count(is_mine_.begin(), is_mine_.begin() + (which - 1), true);
    call(groups_[index], kind, n, is_allocated);
  }

 private:
  static void call(const lockstep::ProcessGroup& group, unsigned kind, int64_t n, bool is_allocated) {
    const int size = group.size(), me = group.rank();
    auto make = [&](int64_t elements) {
      return is_allocated ? group.allocate({elements}, at::kFloat) : at::empty({elements});
    };
    auto tensor = make(n).fill_(me + 1);
    double sum = size * (size + 1) / 2.0;
    switch (kind) {
      case 0:
        group.all_reduce(tensor);
        return expect_equal(tensor.sum().item<double>(), tensor.numel() * sum, "all_reduce");
      case 1:
        group.broadcast(tensor, size - 1);
        return expect_equal(tensor[n - 1].item<double>(), size, "broadcast");
      case 2: {
        auto output = make(n * size);
        group.all_gather(output, tensor);
        return expect_equal(output[n * size - 1].item<double>(), size, "all_gather");
      }
      case 3: {
        auto input = make(n * size).fill_(me + 1);
        group.reduce_scatter(tensor, input);
        return expect_equal(tensor[n - 1].item<double>(), sum, "reduce_scatter");
      }
      case 4:
        group.reduce(tensor, 0);
        return expect_equal(tensor[0].item<double>(), me == 0 ? sum : me + 1, "reduce");
      case 5: {
        auto work = group.send_async(tensor, (me + 1) % size);
        auto received = make(n);
        group.recv(received, (me + size - 1) % size);
        work.wait();
        return expect_equal(received[n / 2].item<double>(), (me + size - 1) % size + 1, "recv");
      }
      default: {
        auto work = group.all_reduce_async(tensor, lockstep::ReduceOp::kMax);
        group.barrier();
        work.wait();
        return expect_equal(tensor[n - 1].item<double>(), size, "all_reduce_async");
      }
    }
  }

  std::mt19937 random_{7};
  std::vector<lockstep::ProcessGroup> groups_;  // of this rank
  std::vector<bool> is_mine_;                   // of the groups beside the world
};
