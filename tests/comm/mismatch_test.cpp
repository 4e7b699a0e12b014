// Ranks that do not make the same calls: each is told both sides, and no data has moved.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>

#include <lockstep/error.h>
#include <lockstep/process_group.h>
#include <lockstep/run_threads.h>

#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using Call = std::function<void(const ProcessGroup&, const at::Tensor&)>;

struct Disagreement {
  std::string name;
  Call usual;                      // of ranks 0 and 2
  Call other;                      // of rank 1
  std::vector<std::string> words;  // of every message
};

void PrintTo(const Disagreement& disagreement, std::ostream* out) {
  *out << disagreement.name;
}

std::vector<at::Tensor> parts(int count, int64_t elements) {
  std::vector<at::Tensor> result;
  for (int i = 0; i < count; ++i) result.push_back(at::zeros({elements}));
  return result;
}

std::vector<Disagreement> disagreements() {
  auto sum = [](const ProcessGroup& group, const at::Tensor& data) { group.all_reduce(data); };
  return {
      {"Operation",
       sum,
       [](const auto& group, const auto& data) { group.broadcast(data, 1); },
       {"all_reduce(sum, Float[6])", "broadcast(Float[6], root 1)", "the operation differs"}},
      {"Dtype",
       sum,
       [](const auto& group, const auto&) { group.all_reduce(at::ones({6}, at::kInt)); },
       {"Float[6]", "Int[6]", "the dtype differs"}},
      {"SameBytesOfAnotherDtype",
       [](const auto& group, const auto&) { group.all_reduce(at::ones({6}, at::kHalf)); },
       [](const auto& group, const auto&) { group.all_reduce(at::ones({6}, at::kBFloat16)); },
       {"Half[6]", "BFloat16[6]", "the dtype differs"}},
      {"Elements",
       sum,
       [](const auto& group, const auto&) { group.all_reduce(at::ones({5})); },
       {"Float[6]", "Float[5]", "the number of elements differs"}},
      {"OperationOnNothing",
       [](const auto& group, const auto&) { group.all_reduce(at::ones({0})); },
       [](const auto& group, const auto&) { group.all_reduce(at::ones({0}), ReduceOp::kMax); },
       {"all_reduce(sum, Float[0])", "all_reduce(max, Float[0])", "the reduce operation differs"}},
      {"EmptyAndNot",
       sum,
       [](const auto& group, const auto&) { (group.all_reduce(at::ones({0})), group.barrier()); },
       {"Float[6]", "Float[0]", "the number of elements differs"}},
      {"LargeAndSmall",
       [](const auto& group, const auto&) { group.all_reduce(at::ones({1 << 20})); },
       [](const auto& group, const auto&) { group.all_reduce(at::ones({(1 << 20) - 1})); },
       {"Float[1048576]", "Float[1048575]", "the number of elements differs"}},
      {"ReduceOperation",
       sum,
       [](const auto& group, const auto& data) { group.all_reduce(data, ReduceOp::kMax); },
       {"all_reduce(sum", "all_reduce(max", "the reduce operation differs"}},
      {"Root",
       [](const auto& group, const auto& data) { (group.broadcast(data, 0), group.barrier()); },
       [](const auto& group, const auto& data) { group.broadcast(data, 2); },
       {"root 0", "root 2", "the root differs"}},
      {"RootOfReduce",
       [](const auto& group, const auto& data) { group.reduce(data, 0); },
       [](const auto& group, const auto& data) { group.reduce(data, 1); },
       {"root 0", "root 1", "the root differs"}},
      {"Order",
       [](const auto& group, const auto& data) { (group.all_reduce(data), group.barrier()); },
       [](const auto& group, const auto& data) { (group.barrier(), group.all_reduce(data)); },
       {"all_reduce(sum, Float[6])", "barrier()", "the operation differs"}},
      {"SkippedCall",
       [](const auto& group, const auto& data) { (group.all_reduce(data), group.barrier()); },
       [](const auto& group, const auto&) { group.barrier(); },
       {"all_reduce(sum, Float[6])", "barrier()", "the operation differs"}},
      {"PartsOfAnAllToAll",
       [](const auto& group, const auto&) { (group.all_to_all(parts(3, 4), parts(3, 4)), group.barrier()); },
       [](const auto& group, const auto&) {
         auto mine = parts(3, 4);
         mine[0] = at::zeros({3});
         group.all_to_all(parts(3, 4), mine);
       },
       {"sends 4 4 4", "sends 3 4 4", "the number of elements between the two differs"}},
      {"PartOfAGather",
       [](const auto& group, const auto&) {
         group.gather(group.rank() == 0 ? parts(3, 4) : parts(0, 0), at::ones({4}), 0);
         group.barrier();
       },
       [](const auto& group, const auto&) {
         group.gather({}, at::ones({3}), 0);
         group.barrier();
       },
       {"gather(Float, root 0", "the number of elements between the two differs"}},
  };
}

class Mismatch : public testing::TestWithParam<std::tuple<std::string, Disagreement>> {};

TEST_P(Mismatch, EveryRankIsToldBothSidesSoon) {
  const auto& [backend, disagreement] = GetParam();
  std::atomic<int> told{0};
  auto begin = std::chrono::steady_clock::now();
  auto body = [&, &disagreement = disagreement](ProcessGroup world) {
    auto data = at::full({6}, world.rank() + 1.0);
    bool is_other = world.rank() == 1;
    try {
      (is_other ? disagreement.other : disagreement.usual)(world, data);
      ADD_FAILURE() << "rank " << world.rank() << " got through";
    } catch (const MismatchError& error) {
      for (const auto& word : disagreement.words) EXPECT_THAT(error.what(), testing::HasSubstr(word));
      EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("rank 1 (pid "), testing::HasSubstr(__FILE__),
                                               testing::HasSubstr("in the same order on all ranks")));
      ++told;
    }
    // Ranks that agree with the root may have its data by then: what they call is right.
    if (disagreement.name != "Root" || is_other) {
      EXPECT_TRUE(at::equal(data, at::full({6}, world.rank() + 1.0))) << "data has moved";
    }
    // Nobody leaves before all are told: a rank that goes would be a reason of its own.
    while (told < world.size() && !testing::Test::HasFailure()) std::this_thread::yield();
  };
  run_threads(3, body, {.backend = backend, .timeout = 60s});
  EXPECT_EQ(told, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

INSTANTIATE_TEST_SUITE_P(Backends, Mismatch,
                         testing::Combine(testing::ValuesIn(backends_under_test()), testing::ValuesIn(disagreements())),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param).name; });

class MismatchedMessage : public testing::TestWithParam<std::string> {};

TEST_P(MismatchedMessage, BothEndsAreToldBothSides) {
  run_threads(2,
              [](ProcessGroup world) {
                auto good = at::full({2}, 7.0);
                world.rank() == 0 ? world.send(good, 1, /*tag=*/5) : world.recv(good, 0, /*tag=*/5);
                expect_error<MismatchError>(
                    [&] { world.rank() == 0 ? world.send(at::ones({4}), 1, 5) : world.recv(at::ones({8}), 0, 5); },
                    "rank 0", "rank 1");
              },
              {.backend = GetParam(), .timeout = 60s});
}

TEST_P(MismatchedMessage, AnotherDtypeOfTheSameSizeIsNotTaken) {
  run_threads(2,
              [](ProcessGroup world) {
                auto received = at::zeros({4}, at::kInt);
                expect_error<MismatchError>(
                    [&] { world.rank() == 0 ? world.send(at::ones({4}), 1) : world.recv(received, 0); }, "rank 0",
                    "rank 1");
                EXPECT_TRUE(at::equal(received, at::zeros({4}, at::kInt)));
              },
              {.backend = GetParam(), .timeout = 60s});
}

INSTANTIATE_TEST_SUITE_P(Backends, MismatchedMessage, testing::ValuesIn(backends_under_test()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lockstep
