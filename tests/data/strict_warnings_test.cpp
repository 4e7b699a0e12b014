// What users write, with the warnings that careful users enable: this file is compiled with -Wconversion,
// -Wsign-conversion and -Werror.

#include <cstdint>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

namespace lockstep {
namespace {

struct Ones : torch::data::datasets::Dataset<Ones> {
  torch::data::Example<> get(size_t) override { return {torch::ones({1}), torch::ones({1})}; }
  torch::optional<size_t> size() const override { return 64; }
};

struct OnesStream {
  std::optional<torch::Tensor> next() { return std::nullopt; }
};

TEST(StrictWarnings, SizesAreDividedByTheNumberOfRanksWithoutACast) {
  run_threads(2, [](ProcessGroup world) {
    int64_t batch_size = 64;
    uint32_t of_flags = 64;
    DistributedSampler sampler(Ones(), world);
    DataLoader loader(Ones(), sampler, {.batch_size = 64 / world.size()});
    DataLoader same(Ones(), sampler, {.batch_size = batch_size / world.size()});
    DataLoader also(Ones(), sampler, {.batch_size = of_flags / static_cast<unsigned>(world.size())});
    DataLoader own(Ones(), {.batch_size = loader.size() * 16, .shuffle = true});
    for (const int64_t batches : {loader.size(), same.size(), also.size()}) EXPECT_EQ(batches, 1);
    EXPECT_EQ(own.size(), 4);
    const auto open = [](const StreamPart&) { return OnesStream(); };
    StreamLoader stream(open, world, {.batch_size = 64 / world.size(), .max_batches = 100 / world.size()});
    EXPECT_TRUE(stream.begin() == stream.end());
    const std::vector<int64_t> lengths(64, 3);
    DistributedSampler similar(similar_length_order(lengths, {.samples_per_step = 16 * world.size()}), Ones(), world);
    DistributedSampler drawn(random_order(64, {.num_samples = 32 * world.size()}), Ones(), world);
    EXPECT_EQ(similar.size() + drawn.size(), 64u);
    EXPECT_EQ(schedules::OneCycleOptions{.total_steps = 1000 / world.size()}.total_steps, 500);
    const int64_t epochs = 20;
    EXPECT_EQ(schedules::OneCycleOptions{.total_steps = epochs * own.size() / world.size()}.total_steps, 40);
  });
}

}  // namespace
}  // namespace lockstep
