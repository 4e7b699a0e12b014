#include <lockstep/collate.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data_loader.h>
#include <lockstep/error.h>

#include "support/messages.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::Tensor;
using Sequence = torch::data::Example<>;

template <class T>
std::vector<T> elements(const Tensor& tensor) {
  return std::vector<T>(tensor.data_ptr<T>(), tensor.data_ptr<T>() + tensor.numel());
}

TEST(Stack, NumbersBecomeTensorsOfTheirDtype) {
  EXPECT_THAT(elements<double>(Stack()(std::vector{1.5, 2.5})), ElementsAre(1.5, 2.5));
  EXPECT_THAT(elements<float>(Stack()(std::vector{1.5F, 2.5F})), ElementsAre(1.5F, 2.5F));
  EXPECT_THAT(elements<int64_t>(Stack()(std::vector<int64_t>{7, -1})), ElementsAre(7, -1));
  EXPECT_EQ(Stack()(std::vector{1, 2}).scalar_type(), torch::kInt);
  EXPECT_THAT(elements<bool>(Stack()(std::vector{true, false})), ElementsAre(true, false));
}

TEST(Stack, PairsTuplesAndMapsAreCollatedItemByItem) {
  using Sample = std::tuple<Tensor, std::pair<int64_t, std::string>, std::map<std::string, double>>;
  const std::vector<Sample> samples{{torch::tensor({1, 2}), {10, "one"}, {{"a", 0.5}, {"b", 1}}},
                                    {torch::tensor({3, 4}), {20, "two"}, {{"a", 2.5}, {"b", 3}}}};
  const auto [tensors, pair, map] = Stack()(samples);
  EXPECT_TRUE(tensors.equal(torch::tensor({{1, 2}, {3, 4}})));
  EXPECT_THAT(elements<int64_t>(pair.first), ElementsAre(10, 20));
  EXPECT_THAT(pair.second, ElementsAre("one", "two"));
  EXPECT_THAT(elements<double>(map.at("a")), ElementsAre(0.5, 2.5));
  EXPECT_THAT(elements<double>(map.at("b")), ElementsAre(1, 3));
}

TEST(Stack, MapsNeedTheSameKeys) {
  using Sample = std::map<std::string, double>;
  for (const auto& other : {Sample{{"b", 1}}, Sample{{"a", 1}, {"b", 1}}, Sample{}})
    EXPECT_THAT(error_of<UsageError>([&] {
                  Stack()(std::vector<Sample>{{{"a", 1}}, other});
                }),
                HasSubstr("sample 1 in the batch has other keys"));
}

struct Pixels {
  Tensor image, mask;
  auto tensors() { return std::tie(image, mask); }
};
struct NamedPixels {
  Tensor image;
  std::string name;
  auto tensors() { return std::tie(image); }
};

TEST(Stack, AStructOfTensorsIsABatchOfTheSameType) {
  const Pixels batch =
      Stack()(std::vector<Pixels>{{torch::ones({2}), torch::zeros({1})}, {torch::full({2}, 3.0), torch::ones({1})}});
  EXPECT_TRUE(batch.image.equal(torch::tensor({{1.0, 1.0}, {3.0, 3.0}})));
  EXPECT_EQ(batch.mask.sizes(), at::IntArrayRef({2, 1}));
  // A member that is no tensor cannot be stacked: nothing is left out.
  const std::vector<NamedPixels> samples = Stack()(std::vector<NamedPixels>{{torch::ones({2}), "a"}, {{}, "b"}});
  EXPECT_EQ(samples[1].name, "b");
}

struct LabelledWords {
  size_t size() const { return 4; }
  std::pair<std::string, int64_t> get(size_t index) const {
    return {std::string(index, 'x'), static_cast<int64_t>(index)};
  }
};

TEST(Stack, ALoaderCollatesAnySample) {
  DataLoader loader(LabelledWords(), DistributedSampler(4, 0, 1, {.shuffle = false}), {.batch_size = 2});
  auto batch = loader.begin();
  ++batch;
  EXPECT_THAT(batch->first, ElementsAre("xx", "xxx"));
  EXPECT_THAT(elements<int64_t>(batch->second), ElementsAre(2, 3));
}

TEST(Pad, EqualsPadSequenceOfLibTorch) {
  const std::vector<Tensor> sequences{torch::rand({3, 2}), torch::rand({5, 2}), torch::rand({0, 2})};
  const auto batch = Pad({.value = -1})(sequences);
  EXPECT_TRUE(batch.data.equal(torch::pad_sequence(sequences, /*batch_first=*/true, -1)));
  EXPECT_THAT(elements<int64_t>(batch.lengths), ElementsAre(3, 5, 0));
  EXPECT_FALSE(batch.target.defined());
  EXPECT_TRUE(batch.mask().equal(torch::tensor({{1, 1, 1, 0, 0}, {1, 1, 1, 1, 1}, {0, 0, 0, 0, 0}}).to(torch::kBool)));
  EXPECT_EQ(Pad({.multiple_of = 4})(sequences).data.sizes(), at::IntArrayRef({3, 8, 2}));
}

TEST(Pad, PadsTargetsThatAreSequencesAndStacksOthers) {
  const auto sequence = [](int64_t length) { return torch::arange(length); };
  const auto tagged = Pad()(std::vector<Sequence>{{sequence(2), sequence(2)}, {sequence(3), sequence(3)}});
  EXPECT_TRUE(tagged.target.equal(torch::tensor({{0, 1, -100}, {0, 1, 2}})));
  EXPECT_TRUE(tagged.data.equal(torch::tensor({{0, 1, 0}, {0, 1, 2}})));
  const auto classified =
      Pad()(std::vector<Sequence>{{sequence(2), torch::tensor(7)}, {sequence(3), torch::tensor(8)}});
  EXPECT_TRUE(classified.target.equal(torch::tensor({7, 8})));
}

TEST(Pad, NamesTheSampleThatDiffers) {
  EXPECT_THAT(error_of<UsageError>([] {
                Pad()({torch::rand({3, 2}), torch::rand({3, 4})});
              }),
              AllOf(HasSubstr("the data of sample 1"), HasSubstr("[3, 4]"), HasSubstr("[3, 2]")));
  EXPECT_THAT(error_of<UsageError>([] { Pad()({torch::rand({3}), torch::rand({})}); }), HasSubstr("sample 1"));
  EXPECT_THAT(error_of<UsageError>([] { Pad()({torch::rand({3}), torch::arange(3)}); }), HasSubstr("sample 1"));
  EXPECT_THAT(error_of<UsageError>([] { Pad({.multiple_of = 0}); }), HasSubstr("multiple_of is 0"));
}

struct Words {
  size_t size() const { return 3; }
  Sequence get(size_t index) const { return {torch::arange(static_cast<int64_t>(index) + 1), torch::tensor(1)}; }
};

TEST(Pad, IsACollateFunctionOfALoader) {
  DataLoader loader(Words(), DistributedSampler(3, 0, 1, {.shuffle = false}), Pad(),
                    {.batch_size = 3, .device = torch::Device("cpu")});
  for (auto& batch : loader) {
    EXPECT_EQ(batch.data.sizes(), at::IntArrayRef({3, 3}));
    EXPECT_THAT(elements<int64_t>(batch.lengths), ElementsAre(1, 2, 3));
  }
}

}  // namespace
}  // namespace lockstep
