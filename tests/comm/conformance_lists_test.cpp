// What every backend must do with lists of tensors: parts of different sizes, many tensors at once, many messages at
// once.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "comm/conformance.h"
#include "comm/group/group.h"
#include "comm/setup/init_process_group.h"
#include "support/messages.h"

namespace lockstep {
namespace {

class ConformanceOfLists : public ConformanceCase {
 protected:
  /// Tensors of many sizes, some of which travel together: none, one and several elements, and several MiB.
  std::vector<at::Tensor> assorted(int rank, int64_t rows = 1) const {
    std::vector<at::Tensor> tensors;
    uint64_t key = 100;
    for (int64_t columns : {3, 0, 1, 500, 40}) tensors.push_back(mine(rank, {rows, columns}, ++key));
    tensors.push_back(mine(rank, {rows, 9, 5}, ++key).transpose(1, 2));
    tensors.push_back(mine(rank, {rows, 600000 / rows}, ++key));
    tensors.push_back(here(values_of(rank, at::kDouble, {rows, 7}, ++key)));
    return tensors;
  }
  std::vector<std::vector<at::Tensor>> assorted_of_all(int64_t rows = 1) const {
    std::vector<std::vector<at::Tensor>> all;
    for (int rank = 0; rank < size(); ++rank) all.push_back(assorted(rank, rows));
    return all;
  }
  static std::vector<at::Tensor> item(const std::vector<std::vector<at::Tensor>>& all, size_t index) {
    std::vector<at::Tensor> of_ranks;
    for (const auto& tensors : all) of_ranks.push_back(tensors[index].cpu());
    return of_ranks;
  }
};

TEST_P(ConformanceOfLists, AllToAllDividesRowsAsTheSplitsSay) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank();
    const auto rows = [](int from, int to) { return int64_t{(from * 3 + to * 2) % 5}; };  // some are 0
    Splits splits;
    std::vector<at::Tensor> expected, parts;
    for (int r = 0; r < size(); ++r) {
      splits.input.push_back(rows(me, r));
      splits.output.push_back(rows(r, me));
      parts.push_back(mine(me * 100 + r, {rows(me, r), 4}));
      expected.push_back(mine(r * 100 + me, {rows(r, me), 4}));
    }
    const auto output = at::zeros_like(at::cat(expected));
    world.all_to_all(output, at::cat(parts), splits);
    EXPECT_TRUE(same_values(output, at::cat(expected)));

    const auto columns = at::zeros({4, output.size(0)}, output.options()).t();  // not contiguous
    world.all_to_all_async(columns, at::cat(parts), splits).synchronize();
    EXPECT_TRUE(same_values(columns, at::cat(expected)));

    const auto equal = blank({size() * 2, 3});
    world.all_to_all(equal, mine(me, {size() * 2, 3}, 7));
    for (int r = 0; r < size(); ++r)
      EXPECT_TRUE(same_values(equal.narrow(0, r * 2, 2), mine(r, {size() * 2, 3}, 7).narrow(0, me * 2, 2)));
  });
}

// Rank r's part has r * 1500 elements: rank 0's is empty, and rank 6's does not fit into the header of a call.
TEST_P(ConformanceOfLists, ReduceScatterGivesPartsOfDifferentSizes) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank();
    for (auto op : reduce_ops_for(GetParam().dtype)) {
      const auto part_of = [&](int rank, int part) {
        return values_of(rank, GetParam().dtype, {part * 1500}, static_cast<uint64_t>(part));
      };
      std::vector<at::Tensor> inputs, of_ranks;
      for (int r = 0; r < size(); ++r) {
        inputs.push_back(here(part_of(me, r)));
        of_ranks.push_back(part_of(r, me));
      }
      const auto expected = reduced_in_order(of_ranks, op);
      const auto output = blank({me * 1500});
      world.reduce_scatter(output, inputs, op);
      EXPECT_TRUE(same_values(output, expected)) << "operation " << static_cast<int>(op);
      for (int r = 0; r < size(); ++r) EXPECT_TRUE(same_values(inputs[r], part_of(me, r))) << "input " << r;
      world.reduce_scatter_async(inputs[me], inputs, op).synchronize();
      EXPECT_TRUE(same_values(inputs[me], expected)) << "in place, operation " << static_cast<int>(op);
    }
  });
}

TEST_P(ConformanceOfLists, CoalescedCallsAreThoseOfEachTensor) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank();
    const auto inputs = assorted_of_all();
    const auto wide = assorted_of_all(size());
    for (const bool is_async : {false, true}) {
      auto summed = assorted(me), copied = assorted(me);
      std::vector<at::Tensor> gathered, scattered;
      for (const auto& tensor : inputs[me]) gathered.push_back(at::zeros({size(), tensor.numel()}, tensor.options()));
      for (const auto& tensor : wide[me]) scattered.push_back(at::zeros({tensor.numel() / size()}, tensor.options()));
      gathered[3] = at::zeros({500, size()}, gathered[3].options()).t();  // not contiguous
      if (is_async) {
        for (const auto& work :
             {world.all_reduce_coalesced_async(summed), world.broadcast_coalesced_async(copied, size() - 1),
              world.all_gather_coalesced_async(gathered, inputs[me]),
              world.reduce_scatter_coalesced_async(scattered, wide[me], ReduceOp::kMax)})
          work.synchronize();
      } else {
        world.all_reduce_coalesced(summed);
        world.broadcast_coalesced(copied, size() - 1);
        world.all_gather_coalesced(gathered, inputs[me]);
        world.reduce_scatter_coalesced(scattered, wide[me], ReduceOp::kMax);
      }
      for (size_t i = 0; i < summed.size(); ++i) {
        const auto what = "tensor " + std::to_string(i) + (is_async ? ", asynchronous" : "");
        EXPECT_TRUE(same_values(summed[i], reduced(item(inputs, i), ReduceOp::kSum))) << what;
        EXPECT_TRUE(same_values(copied[i], inputs[size() - 1][i])) << what;
        for (int r = 0; r < size(); ++r)
          EXPECT_TRUE(same_values(gathered[i][r], inputs[r][i].reshape({-1}))) << what << " of rank " << r;
        const auto largest = reduced(item(wide, i), ReduceOp::kMax).reshape({size(), -1});
        EXPECT_TRUE(same_values(scattered[i], largest[me])) << what;
      }
    }
    world.all_reduce_coalesced({});
    world.broadcast_coalesced_async({}, 0).wait();
  });
}

TEST_P(ConformanceOfLists, AnExchangeHasAnyOrder) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank();
    std::vector<Message> messages;
    std::vector<at::Tensor> received(size());
    for (int r = 0; r < size(); ++r) {  // all receives first, then all sends, of two tags
      if (r == me) continue;
      received[r] = blank({2, 150000});
      for (uint32_t tag : {1, 0}) messages.push_back(Message::recv(received[r][tag], r, tag));
    }
    for (int r = size() - 1; r >= 0; --r)
      if (r != me)
        for (uint32_t tag : {0, 1}) messages.push_back(Message::send(mine(me, {150000}, 10 * r + tag), r, tag));
    world.exchange(messages);
    for (int r = 0; r < size(); ++r)
      for (int64_t tag = 0; tag < 2 && r != me; ++tag)
        EXPECT_TRUE(same_values(received[r][tag], mine(r, {150000}, static_cast<uint64_t>(10 * me + tag))));
    world.exchange({});
  });
}

std::vector<Case> cases_of_lists() {
  std::vector<Case> cases;
  for (const auto& c : all_cases())
    if (c.dtype == at::kFloat || c.dtype == at::kBFloat16 || c.dtype == at::kInt) cases.push_back(c);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceOfLists, testing::ValuesIn(cases_of_lists()), name_of_case);

// --- arguments

TEST(Lists, WithWrongArgumentsAreRefusedBeforeAnythingIsSent) {
  run_threads(2, [](ProcessGroup world) {
    const auto four = at::zeros({4, 3});
    const auto other = at::zeros({4, 3});
    const auto me = "rank " + std::to_string(world.rank());
    expect_error<UsageError>(
        [&] {
          world.all_to_all(four, other, {.output = {2, 1}, .input = {2, 2}});
        },
        me, "all_to_all", "the splits of the output add up to 3, but it has 4 rows");
    expect_error<UsageError>([&] { world.all_to_all(four, other, {.output = {}, .input = {4}}); },
                             "the splits of the input have 1 numbers", "give 2");
    expect_error<UsageError>(
        [&] {
          world.all_to_all(four, other, {.output = {}, .input = {5, -1}});
        },
        "contain -1", "negative");
    expect_error<UsageError>([&] { world.all_to_all(at::zeros({3}), at::zeros({3})); }, "3 rows", "2 ranks",
                             "pass splits");
    expect_error<UsageError>([&] { world.all_to_all(at::zeros({}), at::zeros({})); }, "no dimensions");
    expect_error<UsageError>([&] { world.all_to_all(four, four); }, "share memory");
    expect_error<UsageError>([&] { world.reduce_scatter(at::zeros({3}), std::vector{at::zeros({3})}); }, "1 tensors",
                             "give 2");
    expect_error<UsageError>(
        [&] {
          world.reduce_scatter(at::zeros({3}), {at::zeros({2}), at::zeros({2})});
        },
        "this rank's own part", "2 elements in the input but 3");
    expect_error<UsageError>(
        [&] {
          world.reduce_scatter(at::zeros({2}), {at::zeros({2}, at::kInt), at::zeros({2}, at::kInt)});
        },
        "the output is Float and the input Int");
    expect_error<UsageError>([&] { world.all_reduce_coalesced({four, at::Tensor()}); }, me, "undefined");
    expect_error<UsageError>(
        [&] {
          world.all_reduce_coalesced({four, at::zeros({2}, at::kComplexFloat)});
        },
        me, "ComplexFloat");
    expect_error<UsageError>([&] { world.broadcast_coalesced({four}, 2); }, "src is rank 2", "0 to 1");
    expect_error<UsageError>([&] { world.all_gather_coalesced({four}, {}); }, me, "1 outputs and 0 inputs");
    expect_error<UsageError>([&] { world.all_gather_coalesced({four}, {at::zeros({5})}); }, "12 elements",
                             "its input 5", "10");
    expect_error<UsageError>(
        [&] {
          world.exchange({Message::send(four, 1 - world.rank()), Message::recv(other, 7)});
        },
        "recv", "src is rank 7");
    world.barrier();  // the group is usable, and no message is left over
    auto message = at::full({2}, static_cast<float>(world.rank()));
    world.rank() == 0 ? world.send(message, 1) : world.recv(message, 0);
    EXPECT_TRUE(at::equal(message, at::zeros({2})));
  });
}

TEST(Lists, TravelInFewCalls) {
  auto group = detail::init_group({.rank = 0, .world_size = 1});
  const ProcessGroup world(group);
  const auto calls_of = [&](const std::vector<at::Tensor>& tensors) {
    const auto before = group->job()->recorder()->records().size();
    world.all_reduce_coalesced(tensors);
    return group->job()->recorder()->records().size() - before;
  };
  const auto repeated = [](int64_t count, const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors;
    for (int64_t i = 0; i < count; ++i) tensors.push_back(tensor.clone());
    return tensors;
  };
  auto mixed = repeated(50, at::ones({100}));
  EXPECT_EQ(calls_of(mixed), 1u);
  mixed.push_back(at::ones({100}, at::kInt));
  mixed.push_back(at::ones({300000}));
  EXPECT_EQ(calls_of(mixed), 3u) << "one more for the other dtype, and one for the large tensor";
  const auto megabytes = repeated(60, at::ones({1 << 20}, at::kByte));
  EXPECT_EQ(calls_of(megabytes), 3u) << "at most 25 MiB in each";
  for (const auto& tensor : megabytes) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
}

TEST(Lists, ThatDifferBetweenRanksAreAMismatch) {
  const auto expect_mismatch = [](const std::function<void(const ProcessGroup&)>& call, const char* what) {
    run_threads_into_an_error(2, [&](ProcessGroup world) { expect_error<MismatchError>([&] { call(world); }, what); });
  };
  expect_mismatch(
      [](const ProcessGroup& world) {
        const int64_t n = 3 + world.rank();
        world.all_reduce_coalesced({at::zeros({n}), at::zeros({9 - n})});  // 9 elements on both ranks
      },
      "the list of tensors");
  expect_mismatch(
      [](const ProcessGroup& world) {
        const int64_t n = 3 + world.rank();
        const auto parts = std::vector{at::zeros({n}), at::zeros({9 - n})};
        world.reduce_scatter(at::zeros_like(parts[world.rank()]), parts);
      },
      "reduce_scatter");
}

}  // namespace
}  // namespace lockstep
