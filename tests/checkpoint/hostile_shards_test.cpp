// Hostile shards: they are checked before memory is allocated, and each is read once.

#include <sys/stat.h>

#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "checkpoint/shards.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

constexpr int64_t kTera = int64_t{1} << 40;

Value piece(int64_t begin, int64_t size, const at::Tensor& tensor) {
  return Value::dict({{"parameter", 0}, {"begin", begin}, {"size", size}, {"state", Value::dict({{"m", tensor}})}});
}

Value shard(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, std::vector<Value> pieces) {
  const auto list = [](const std::vector<int64_t>& numbers) {
    return Value::list(std::vector<Value>(numbers.begin(), numbers.end()));
  };
  return Value::dict({{"param_groups", Value::list()},
                      {"sizes", Value::list({list(sizes)})},
                      {"strides", Value::list({list(strides)})},
                      {"pieces", Value::list(std::move(pieces))}});
}

TEST(HostileShards, AreCheckedBeforeMemoryIsAllocated) {
  using detail::merge_shards;
  const auto two = torch::ones({2});
  const auto merged = merge_shards({shard({2, 2}, {1, 2}, {piece(0, 2, two), piece(2, 2, two.clone())})});
  EXPECT_EQ(merged.at("state").at(0).at("m"), Value(torch::ones({2, 2}).t()));
  const auto swapped = merge_shards({shard({3}, {1}, {piece(2, 1, torch::zeros({1})), piece(0, 2, two)})});
  EXPECT_EQ(swapped.at("state").at(0).at("m"), Value(torch::tensor({1.f, 1.f, 0.f})));

  const auto expect_refused = [](const Value& shard, const auto&... parts) {
    expect_error<CheckpointError>([&] { merge_shards({shard}); }, parts...);
  };
  expect_refused(shard({kTera}, {1}, {piece(0, 2, two)}), "have 2 elements", "expected 1099511627776");
  expect_refused(shard({kTera}, {1}, {piece(0, kTera, torch::ones({1}).expand({kTera}))}),
                 "but only 4 bytes are stored");
  const auto quarter = torch::ones({1}).expand({int64_t{1} << 60});
  expect_refused(shard({1}, {1}, std::vector<Value>(4, piece(0, quarter.numel(), quarter))), "only 4 bytes are stored");
  expect_refused(shard({4}, {1}, {piece(0, 2, two), piece(2, 2, two)}), "have 16 bytes, but only 8");
  expect_refused(shard({4}, {1}, {piece(0, 2, two), piece(2, 2, two.to(torch::kByte))}), "as float32 and as uint8");
  expect_refused(shard({2, kTera}, {1, 0}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({kTera, kTera}, {1, 1}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({2}, {-1}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({2, 1}, {1}, {piece(0, 2, two)}), "expected memory without gaps");
  expect_refused(shard({2}, {1}, {piece(1, 2, two)}), "'m' of parameter 0: a shard has 2 elements starting at 1",
                 "expected at most 2 starting at 0");
  expect_refused(shard({2}, {1}, {piece(std::numeric_limits<int64_t>::max(), 2, two)}), "has 2 elements starting at");
  expect_refused(shard({2}, {1}, {piece(-2, 2, two)}), "has 2 elements starting at -2");
  expect_refused(shard({4}, {1}, {piece(0, 2, two), piece(0, 2, two.clone())}), "has 2 elements starting at 0",
                 "expected at most 2 starting at 2");
  expect_refused(shard({4}, {1}, {piece(0, 3, torch::ones({3})), piece(2, 2, two)}),
                 "expected at most 1 starting at 3");
  expect_refused(shard({3}, {1}, {piece(0, 2, two), piece(2, 2, two.clone())}), "expected at most 1 starting at 2");
}

TEST(HostileShards, AreNotReadTwice) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder.path() / name).string(); };
  const auto one = shard({2}, {1}, {piece(0, 2, torch::ones({2}))});
  const auto digest = save_checkpoint(in_folder("shard.pt"), Value::dict({{"o", one}}));
  const auto listed = Value::dict({{"file", "shard.pt"}, {"sha256", digest}});
  save_checkpoint(in_folder("main.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", Value::list({listed})}}));
  EXPECT_EQ(load_merged_checkpoint(in_folder("main.pt")).at("o").at("state").size(), 1u);
  const auto twice = Value::list({listed, listed});
  save_checkpoint(in_folder("twice.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", twice}}));
  expect_error<CheckpointError>([&] { load_merged_checkpoint(in_folder("twice.pt")); }, "lists shard.pt twice");
}

TEST(HostileShards, OfManyObjectsShareTheLimit) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder.path() / name).string(); };
  const auto one = shard({2}, {1}, {piece(0, 2, torch::ones({2}))});
  const auto digest = save_checkpoint(in_folder("shard.pt"), Value::dict({{"a", one}, {"b", one}}));
  const auto listed = Value::dict({{"file", "shard.pt"}, {"sha256", digest}});
  save_checkpoint(in_folder("main.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", Value::list({listed})}}));
  expect_error<CheckpointError>([&] { load_merged_checkpoint(in_folder("main.pt")); }, "have 16 bytes, but only 8");
}

TEST(HostileShards, AFifoDoesNotBlock) {
  const TemporaryFolder folder;
  const auto in_folder = [&](const std::string& name) { return (folder.path() / name).string(); };
  ASSERT_EQ(::mkfifo(in_folder("fifo.pt").c_str(), 0600), 0);
  const auto listed = Value::dict({{"file", "fifo.pt"}, {"sha256", "0"}});
  save_checkpoint(in_folder("main.pt"), Value::dict({{"lockstep", "0.1.0"}, {"shards", Value::list({listed})}}));
  expect_error<CheckpointError>([&] { load_checkpoint(in_folder("fifo.pt")); }, "not a regular file");
  expect_error<CheckpointError>([&] { verify_checkpoint(in_folder("fifo.pt")); }, "not a regular file");
  expect_error<CheckpointError>([&] { load_merged_checkpoint(in_folder("main.pt")); }, "fifo.pt", "not a regular file");
}

}  // namespace
}  // namespace lockstep
