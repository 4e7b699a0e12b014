#include <lockstep/batch_traits.h>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collate.h>
#include <lockstep/error.h>
#include <lockstep/group_loader.h>
#include <lockstep/run_threads.h>

namespace lockstep {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

template <class T>
T sent(const T& batch) {
  return detail::unpack_batch<T>(detail::pack_batch(batch));
}

// Members of several types, all listed.
struct Scene {
  torch::Tensor image;
  std::vector<torch::Tensor> boxes;
  std::map<std::string, torch::Tensor> masks;
  auto tensors() { return std::tie(image, boxes, masks); }
};

// Have a member that tensors() does not list; Sentences has a trait, below.
struct Unlisted {
  torch::Tensor tokens;
  std::vector<std::string> texts;
  auto tensors() { return std::tie(tokens); }
};
struct Sentences : Unlisted {};

struct NamedTensor {
  explicit NamedTensor(torch::Tensor value) : data(std::move(value)) {}
  torch::Tensor data;
  auto tensors() { return std::tie(data); }
};

struct Opaque {
  int number = 0;
};

struct OpaqueMember {
  torch::Tensor data;
  Opaque opaque;
  auto tensors() { return std::tie(data, opaque); }
};

static_assert(Sendable<Scene> && Sendable<PaddedBatch> && Sendable<torch::data::Example<>>);
static_assert(!Sendable<Opaque> && !Sendable<std::vector<Opaque>> && !Sendable<std::map<std::string, Opaque>>);
static_assert(!Sendable<std::pair<int, Opaque>> && !Sendable<std::tuple<torch::Tensor, Opaque>>);
static_assert(!Sendable<Unlisted>, "a member would be lost");
static_assert(!Sendable<NamedTensor>, "it cannot be constructed on the receiving rank");
static_assert(!Sendable<OpaqueMember>, "a member cannot be sent");
static_assert(!Sendable<int*> && !Sendable<const char*>);

TEST(BatchTraits, KeepTensorsOfAllKinds) {
  for (const auto& tensor :
       {torch::arange(6).reshape({2, 3}), torch::rand({2, 3}, torch::kHalf), torch::rand({}, torch::kBFloat16),
        torch::rand({2}, torch::kComplexFloat), torch::ones({3}, torch::kBool), torch::empty({0, 5}),
        torch::rand({3, 2}).t(), torch::rand({2}, torch::kComplexDouble).conj(), torch::rand({4, 4}).slice(1, 0, 4, 2),
        torch::rand({2}, torch::requires_grad())}) {
    const auto got = sent(tensor);
    EXPECT_EQ(got.scalar_type(), tensor.scalar_type());
    EXPECT_EQ(got.sizes(), tensor.sizes());
    EXPECT_TRUE(torch::equal(got, tensor.detach().resolve_conj())) << tensor;
    EXPECT_FALSE(got.requires_grad());
  }
  EXPECT_FALSE(sent(torch::Tensor()).defined());
  const auto images = torch::rand({2, 3, 4, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(sent(images).is_contiguous(torch::MemoryFormat::ChannelsLast));
  EXPECT_TRUE(torch::equal(sent(images), images));
  EXPECT_THROW(sent(torch::eye(3).to_sparse()), UsageError);
}

TEST(BatchTraits, KeepNumbersAndStrings) {
  enum class Color : uint8_t { kRed, kBlue };
  EXPECT_EQ(sent(-7), -7);
  EXPECT_EQ(sent(2.5f), 2.5f);
  EXPECT_EQ(sent(true), true);
  EXPECT_EQ(sent(Color::kBlue), Color::kBlue);
  EXPECT_EQ(sent(std::string("a\0b", 3)), std::string("a\0b", 3));
  EXPECT_EQ(sent(std::string()), "");
}

TEST(BatchTraits, KeepContainersAtAnyDepth) {
  using Nested = std::vector<std::pair<std::optional<std::string>, std::array<int, 2>>>;
  const Nested nested{{"a", {1, 2}}, {std::nullopt, {3, 4}}};
  EXPECT_EQ(sent(nested), nested);
  EXPECT_EQ(sent(std::vector<bool>{true, false}), (std::vector<bool>{true, false}));
  EXPECT_EQ(sent(std::vector<std::string>()), std::vector<std::string>());
  EXPECT_EQ(sent(std::tuple<>()), std::tuple<>());
  const std::map<int, std::map<std::string, double>> maps{{1, {{"x", 0.5}, {"y", -1}}}, {2, {}}};
  EXPECT_EQ(sent(maps), maps);
  const auto order = sent(std::tuple(1, std::string("two"), 3.0, std::vector{4}));
  EXPECT_EQ(order, std::tuple(1, std::string("two"), 3.0, std::vector{4}));
}

TEST(BatchTraits, KeepStructsThatListAllTheirMembers) {
  const Scene scene{
      torch::rand({3}), {torch::rand({1}), torch::Tensor(), torch::rand({2})}, {{"sky", torch::rand({4})}}};
  const auto got = sent(scene);
  EXPECT_TRUE(torch::equal(got.image, scene.image));
  ASSERT_EQ(got.boxes.size(), 3u);
  EXPECT_FALSE(got.boxes[1].defined());
  EXPECT_TRUE(torch::equal(got.boxes[2], scene.boxes[2]));
  EXPECT_TRUE(torch::equal(got.masks.at("sky"), scene.masks.at("sky")));
}

TEST(BatchTraits, KeepExamples) {
  const auto got = sent(torch::data::Example<>(torch::rand({2}), torch::Tensor()));
  EXPECT_TRUE(got.data.defined() && !got.target.defined());
  EXPECT_EQ(sent(torch::data::Example<std::string, int>("a", 3)).target, 3);
  EXPECT_EQ(sent(torch::data::TensorExample(torch::ones({2}))).data.sum().item<int>(), 2);
}

TEST(BatchTraits, RefuseBatchesOfAnotherType) {
  const auto refused = [](const std::string& bytes, auto expected) -> std::string {
    try {
      detail::unpack_batch<decltype(expected)>(bytes);
      return "no error";
    } catch (const MismatchError& error) {
      return error.what();
    }
  };
  const auto tensor = detail::pack_batch(torch::rand({3}));
  EXPECT_THAT(refused(tensor, std::string()), HasSubstr("expected a string, found a tensor; use the same type"));
  EXPECT_THAT(refused(detail::pack_batch(1), int64_t{0}), HasSubstr("expected a number of 8 bytes, found one of 4"));
  EXPECT_THAT(refused(detail::pack_batch(std::pair(1, 2)), 1), HasSubstr("expected the end of the batch, found a num"));
  EXPECT_THAT(refused(detail::pack_batch(1), std::pair(1, 2)), HasSubstr("expected a number, found the end"));
  EXPECT_THAT(refused(detail::pack_batch(std::vector{1}), 1), HasSubstr("expected a number, found a container"));
  for (size_t bytes = 0; bytes < tensor.size(); ++bytes)
    EXPECT_THAT(refused(tensor.substr(0, bytes), torch::Tensor()), HasSubstr("found the end of the batch")) << bytes;
  EXPECT_THAT(refused(tensor + "x", torch::Tensor()), HasSubstr("expected the end of the batch, found 1 bytes"));
}

}  // namespace

template <>
struct BatchTraits<Sentences> {
  static void write(BatchWriter& to, const Sentences& batch) {
    to.write(batch.tokens);
    to.write(batch.texts);
  }
  static Sentences read(BatchReader& from) {
    auto tokens = from.read<torch::Tensor>();
    return {{tokens, from.read<std::vector<std::string>>()}};
  }
};

namespace {

// Calls the function with each batch that a GroupLoader delivers on the second of two ranks, which does not read.
template <class Batch, class Data, class... Collate>
void on_the_receiver(const std::function<void(Batch&)>& function, Data dataset, Collate... collate) {
  std::atomic<int> opened = 0, delivered = 0;
  run_threads(2, [&](ProcessGroup world) {
    const DistributedSampler sampler(4, 0, 1, {.shuffle = false});
    const auto open = [&] { return ++opened, dataset; };
    GroupLoader loader(open, sampler, {.broadcast = world}, collate..., {.batch_size = 4});
    static_assert(std::is_same_v<typename decltype(loader)::Batch, Batch>);
    for (Batch& batch : loader)
      if (world.rank() == 1) {
        ++delivered;
        function(batch);
      }
  });
  EXPECT_EQ(opened, 1);
  EXPECT_EQ(delivered, 1);
}

// A dataset whose samples are what the function returns.
template <class Make>
struct Made {
  auto get(size_t index) const { return make(static_cast<int64_t>(index)); }
  Make make;
};
template <class Make>
Made(Make) -> Made<Make>;

const auto kSquares = torch::tensor({0, 1, 4, 9});

TEST(BatchTypes, NumbersPairsTuplesAndMapsArriveAsADataLoaderMakesThem) {
  on_the_receiver<torch::Tensor>([](auto& batch) { EXPECT_TRUE(torch::equal(batch, kSquares)); },
                                 Made{[](int64_t i) { return i * i; }});
  on_the_receiver<std::pair<torch::Tensor, std::vector<std::string>>>(
      [](auto& batch) {
        EXPECT_TRUE(torch::equal(batch.first, kSquares));
        EXPECT_THAT(batch.second, ElementsAre("0", "1", "2", "3"));
      },
      Made{[](int64_t i) { return std::pair(torch::tensor(i * i), std::to_string(i)); }});
  on_the_receiver<std::tuple<torch::Tensor, torch::Tensor, torch::Tensor>>(
      [](auto& batch) { EXPECT_TRUE(torch::equal(std::get<2>(batch), kSquares)); },
      Made{[](int64_t i) { return std::tuple(0.5, torch::zeros({2}), i * i); }});
  on_the_receiver<std::map<std::string, torch::Tensor>>(
      [](auto& batch) { EXPECT_TRUE(torch::equal(batch.at("square"), kSquares)); }, Made{[](int64_t i) {
        return std::map<std::string, torch::Tensor>{{"i", torch::tensor(i)}, {"square", torch::tensor(i * i)}};
      }});
  on_the_receiver<std::vector<std::string>>([](auto& batch) { EXPECT_EQ(batch.at(3), "3"); },
                                            Made{[](int64_t i) { return std::to_string(i); }});
}

TEST(BatchTypes, PaddedSequencesAndStructsOfTensorsArrive) {
  on_the_receiver<PaddedBatch>(
      [](auto& batch) {
        EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{4, 4}));
        EXPECT_TRUE(torch::equal(batch.lengths, torch::arange(1, 5)));
        EXPECT_FALSE(batch.target.defined());
        EXPECT_EQ(batch.mask().sum().template item<int>(), 10);
      },
      Made{[](int64_t i) { return torch::ones({i + 1}); }}, Pad());
  struct Point {
    torch::Tensor x, y;
    auto tensors() { return std::tie(x, y); }
  };
  on_the_receiver<Point>([](auto& batch) { EXPECT_TRUE(torch::equal(batch.y, kSquares)); }, Made{[](int64_t i) {
                           return Point{torch::tensor(i), torch::tensor(i * i)};
                         }});
}

TEST(BatchTypes, AStructWithATraitOfItsOwnArrivesWhole) {
  const auto collate = [](std::vector<int64_t> samples) {
    Sentences batch{{torch::tensor(samples), {}}};
    for (const int64_t sample : samples) batch.texts.push_back("sentence " + std::to_string(sample));
    return batch;
  };
  on_the_receiver<Sentences>(
      [](auto& batch) {
        EXPECT_TRUE(torch::equal(batch.tokens, torch::arange(4)));
        EXPECT_EQ(batch.texts.at(2), "sentence 2");
      },
      Made{[](int64_t i) { return i; }}, collate);
}

TEST(BatchTypes, SamplesDecideTheTypeEvenIfTheDatasetGathers) {
  struct Gathering {
    torch::Tensor get(size_t index) const { return torch::tensor(static_cast<int64_t>(index)); }
    std::string gather(c10::ArrayRef<size_t>) const { return "not called"; }
  };
  on_the_receiver<torch::Tensor>([](auto& batch) { EXPECT_TRUE(torch::equal(batch, torch::arange(4))); }, Gathering());
}

}  // namespace
}  // namespace lockstep
