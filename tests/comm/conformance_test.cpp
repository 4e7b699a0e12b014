// What every backend must do. A backend is done when it passes this suite, with ranks as threads and, where it joins
// processes, as processes.

#include <atomic>
#include <random>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "comm/conformance.h"
#include "comm/torch_version.h"
#include "support/messages.h"

namespace lockstep {
namespace {

class Conformance : public ConformanceCase {};

TEST_P(Conformance, AllReduceGivesEveryRankTheReductionInTheOrderOfRanks) {
  on_every_rank([&](ProcessGroup world) {
    uint64_t key = 0;
    for (auto op : reduce_ops_for(GetParam().dtype)) {
      for (int64_t n : {1, 5, 1000, 20011}) {
        auto tensor = mine(world.rank(), {n}, ++key);
        world.all_reduce(tensor, op);
        EXPECT_TRUE(same_values(tensor, reduced(all({n}, key), op)))
            << n << " elements, operation " << static_cast<int>(op);
      }
    }
  });
}

TEST_P(Conformance, ReduceGivesTheResultToOneRankAndLeavesTheOthersAlone) {
  on_every_rank([&](ProcessGroup world) {
    for (int root = 0; root < size(); ++root) {
      for (int64_t n : {3, 5000}) {
        uint64_t key = static_cast<uint64_t>(root * 10000 + n);
        auto tensor = mine(world.rank(), {n}, key);
        world.reduce(tensor, root);
        auto expected = world.rank() == root ? reduced(all({n}, key), ReduceOp::kSum) : mine(world.rank(), {n}, key);
        EXPECT_TRUE(same_values(tensor, expected)) << "root " << root << ", " << n << " elements";
      }
    }
  });
}

TEST_P(Conformance, BroadcastCopiesTheSourceEverywhere) {
  on_every_rank([&](ProcessGroup world) {
    for (int root = 0; root < size(); ++root) {
      for (int64_t n : {1, 30011}) {
        auto tensor = mine(world.rank(), {n}, 7);
        world.broadcast(tensor, root);
        EXPECT_TRUE(same_values(tensor, mine(root, {n}, 7))) << "root " << root << ", " << n << " elements";
      }
    }
  });
}

TEST_P(Conformance, AllGatherLaysTheInputsOneAfterTheOther) {
  on_every_rank([&](ProcessGroup world) {
    auto output = blank({size(), 11, 3});
    world.all_gather(output, mine(world.rank(), {11, 3}));
    EXPECT_TRUE(same_values(output, at::stack(all({11, 3}))));

    auto in_place = blank({size(), 50});
    in_place[world.rank()].copy_(mine(world.rank(), {50}, 1));
    world.all_gather(in_place, in_place[world.rank()]);
    EXPECT_TRUE(same_values(in_place, at::stack(all({50}, 1))));
  });
}

// Rank r's part has r elements more than the one before, and rank 0's may be empty.
TEST_P(Conformance, PartsOfDifferentSizesArrive) {
  on_every_rank([&](ProcessGroup world) {
    int me = world.rank();
    std::vector<at::Tensor> expected, outputs;
    for (int r = 0; r < size(); ++r) {
      expected.push_back(mine(r, {r * 3}));
      outputs.push_back(blank({r * 3}));
    }
    world.all_gather(outputs, expected[me]);
    for (int r = 0; r < size(); ++r) EXPECT_TRUE(same_values(outputs[r], expected[r])) << "all_gather, rank " << r;

    for (int root = 0; root < size(); ++root) {
      for (auto& output : outputs) output.zero_();
      world.gather(me == root ? outputs : std::vector<at::Tensor>{}, expected[me], root);
      for (int r = 0; me == root && r < size(); ++r)
        EXPECT_TRUE(same_values(outputs[r], expected[r])) << "gather " << r;

      auto part = blank({me * 3});
      world.scatter(part, me == root ? expected : std::vector<at::Tensor>{}, root);
      EXPECT_TRUE(same_values(part, expected[me])) << "scatter from " << root;
    }

    std::vector<at::Tensor> to_each, from_each;
    for (int r = 0; r < size(); ++r) {
      to_each.push_back(mine(me * 100 + r, {me + 2 * r}));
      from_each.push_back(blank({r + 2 * me}));
    }
    world.all_to_all(from_each, to_each);
    for (int r = 0; r < size(); ++r)
      EXPECT_TRUE(same_values(from_each[r], mine(r * 100 + me, {r + 2 * me}))) << "all_to_all from " << r;
  });
}

TEST_P(Conformance, ReduceScatterGivesEachRankItsPartOfTheReduction) {
  on_every_rank([&](ProcessGroup world) {
    for (int64_t n : {1, 7, 9001}) {
      auto input = mine(world.rank(), {size(), n}, n);
      auto expected = reduced(all({size(), n}, n), ReduceOp::kSum)[world.rank()];
      auto output = blank({n});
      world.reduce_scatter(output, input);
      EXPECT_TRUE(same_values(output, expected)) << n << " elements";
      EXPECT_TRUE(same_values(input, mine(world.rank(), {size(), n}, n))) << "the input changed";

      world.reduce_scatter(input[world.rank()], input);
      EXPECT_TRUE(same_values(input[world.rank()], expected)) << n << " elements, in place";
    }
  });
}

TEST_P(Conformance, MessagesArriveByTagAndInOrder) {
  on_every_rank([&](ProcessGroup world) {
    if (size() == 1) return;
    int next = (world.rank() + 1) % size();
    int previous = (world.rank() + size() - 1) % size();
    auto sent = [&](int rank, uint64_t key) { return mine(rank, {1 + static_cast<int64_t>(key) * 4000}, key); };
    std::vector<Work> work;
    std::vector<at::Tensor> received;
    // All ranks send first, around a ring, and receive the tags in another order than they were sent.
    for (uint32_t tag : {0, 1, 2}) work.push_back(world.send_async(sent(world.rank(), tag), next, tag));
    for (uint32_t tag : {2, 0, 1}) {
      received.push_back(at::zeros_like(sent(previous, tag)));
      world.recv(received.back(), previous, tag);
      EXPECT_TRUE(same_values(received.back(), sent(previous, tag))) << "tag " << tag;
    }
    for (auto& one : work) one.wait();

    auto first = blank({10}), second = blank({10});
    auto receive_first = world.recv_async(first, previous);
    auto receive_second = world.recv_async(second, previous);
    world.send(mine(world.rank(), {10}, 8), next);
    world.send(mine(world.rank(), {10}, 9), next);
    receive_second.wait();
    receive_first.wait();
    EXPECT_TRUE(same_values(first, mine(previous, {10}, 8)));
    EXPECT_TRUE(same_values(second, mine(previous, {10}, 9)));
  });
}

TEST_P(Conformance, AnyLayoutWorks) {
  on_every_rank([&](ProcessGroup world) {
    auto whole = reduced(all({6, 8}), ReduceOp::kSum);
    auto check = [&](const char* what, const std::function<at::Tensor(at::Tensor)>& view) {
      auto base = mine(world.rank(), {6, 8});
      auto part = view(base);
      world.all_reduce(part);
      EXPECT_TRUE(same_values(view(base), view(whole))) << what;
    };
    check("transposed", [](at::Tensor t) { return t.t(); });
    check("every second column", [](at::Tensor t) { return t.slice(1, 0, 8, 2); });
    check("one column", [](at::Tensor t) { return t.select(1, 3); });
    check("one element", [](at::Tensor t) { return t[2][3]; });
    check("nothing", [](at::Tensor t) { return t.narrow(0, 0, 0); });

    auto columns = blank({8, size() * 2}).t();  // an output that is not contiguous
    world.all_gather(columns, mine(world.rank(), {8, 2}, 1).t());
    std::vector<at::Tensor> expected;
    for (const auto& tensor : all({8, 2}, 1)) expected.push_back(tensor.t());
    EXPECT_TRUE(same_values(columns, at::cat(expected)));

    if (size() > 1) {
      int next = (world.rank() + 1) % size(), previous = (world.rank() + size() - 1) % size();
      auto target = blank({5, 4}).t();
      auto received = world.recv_async(target, previous);
      world.send(mine(world.rank(), {5, 4}, 2).t(), next);
      received.wait();
      EXPECT_TRUE(same_values(target, mine(previous, {5, 4}, 2).t()));
    }
  });
}

TEST_P(Conformance, AsynchronousCallsRunInOrderAndSynchronousOnesWaitTheirTurn) {
  on_every_rank([&](ProcessGroup world) {
    auto tensor = mine(world.rank(), {4000});
    std::vector<Work> work;
    work.push_back(world.broadcast_async(tensor, 0));
    work.push_back(world.all_reduce_async(tensor, ReduceOp::kMax));
    work.push_back(world.barrier_async());
    world.all_reduce(tensor, ReduceOp::kMin);
    for (auto& one : work) {
      one.synchronize();
      EXPECT_TRUE(one.is_done());
    }
    EXPECT_TRUE(same_values(tensor, mine(0, {4000})));  // the maximum of equal tensors, and the minimum of those
  });
}

// On every rank, on some, or in a part of it: where a tensor lies is each rank's own affair. Small ones and large ones.
TEST_P(Conformance, AllocatedMemoryIsLikeAnyOther) {
  on_every_rank([&](ProcessGroup world) {
    for (int64_t n : {21, 20011}) {
      for (int allocating : {0, 1}) {  // from this rank on
        auto make = [&](at::IntArrayRef sizes) {
          return world.rank() >= allocating ? world.allocate(sizes, GetParam().dtype) : blank(sizes);
        };
        auto what = "from rank " + std::to_string(allocating) + " on, " + std::to_string(n) + " elements";
        auto tensor = make({n}).copy_(mine(world.rank(), {n}));
        world.all_reduce(tensor);
        EXPECT_TRUE(same_values(tensor, reduced(all({n}), ReduceOp::kSum))) << what;

        tensor.copy_(mine(world.rank(), {n}));
        world.reduce(tensor, size() - 1);
        auto expected = world.rank() == size() - 1 ? reduced(all({n}), ReduceOp::kSum) : mine(world.rank(), {n});
        EXPECT_TRUE(same_values(tensor, expected)) << what;

        tensor.copy_(mine(world.rank(), {n}));
        world.broadcast(tensor, size() - 1);
        EXPECT_TRUE(same_values(tensor, mine(size() - 1, {n}))) << what;

        auto whole = make({size(), n}).zero_();
        whole[world.rank()].copy_(mine(world.rank(), {n}));
        world.all_gather(whole, whole[world.rank()]);
        EXPECT_TRUE(same_values(whole, at::stack(all({n})))) << what;

        whole.copy_(mine(world.rank(), {size(), n}, 3));
        world.reduce_scatter(whole[world.rank()], whole);
        EXPECT_TRUE(same_values(whole[world.rank()], reduced(all({size(), n}, 3), ReduceOp::kSum)[world.rank()]))
            << what;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, Conformance, testing::ValuesIn(all_cases()), name_of_case);

/// The checks that do not depend on the dtype, or would take too long for each.
class ConformanceOnce : public OnEveryRank {};

// Bytes are compared: LibTorch has no comparison for all of these dtypes.
TEST_P(ConformanceOnce, DtypesWithoutReductionsAreMoved) {
  std::vector<at::ScalarType> dtypes{at::kComplexHalf, at::kComplexFloat, at::kComplexDouble};
  const auto newer = detail::dtypes_since_1_13();
  dtypes.insert(dtypes.end(), newer.begin(), newer.end());
  on_every_rank([&](ProcessGroup world) {
    for (const auto dtype : dtypes) {
      SCOPED_TRACE(at::toString(dtype));
      const auto width = static_cast<int64_t>(c10::elementSize(dtype));
      auto bytes_of_rank = [&](int rank) { return values_of(rank, at::kByte, {6 * width}, 1); };
      auto of_rank = [&](int rank) { return here(bytes_of_rank(rank).view(dtype)); };
      auto expect_rank = [&](const at::Tensor& tensor, int rank) {
        EXPECT_TRUE(tensor.cpu().contiguous().view(at::kByte).equal(bytes_of_rank(rank))) << "of rank " << rank;
      };
      auto blanks = [&](int count) {
        std::vector<at::Tensor> result;
        for (int i = 0; i < count; ++i) result.push_back(here(at::zeros({6 * width}, at::kByte).view(dtype)));
        return result;
      };
      const int me = world.rank(), root = world.size() - 1;

      auto broadcast = of_rank(me);
      world.broadcast(broadcast, root);
      expect_rank(broadcast, root);
      auto apart = here(at::zeros({6, 2 * width}, at::kByte).view(dtype)).select(1, 1);  // not contiguous
      apart.copy_(of_rank(me));
      world.broadcast(apart, root);
      expect_rank(apart, root);

      auto all = blanks(world.size());
      world.all_gather(all, of_rank(me));
      for (int rank = 0; rank < world.size(); ++rank) expect_rank(all[rank], rank);
      auto whole = here(at::zeros({world.size() * 6 * width}, at::kByte).view(dtype));
      world.all_gather(whole, of_rank(me));
      for (int rank = 0; rank < world.size(); ++rank) expect_rank(whole.narrow(0, 6 * rank, 6), rank);

      auto gathered = me == root ? blanks(world.size()) : std::vector<at::Tensor>();
      world.gather(gathered, of_rank(me), root);
      for (size_t rank = 0; rank < gathered.size(); ++rank) expect_rank(gathered[rank], static_cast<int>(rank));
      std::vector<at::Tensor> parts;
      for (int rank = 0; me == root && rank < world.size(); ++rank) parts.push_back(of_rank(rank));
      auto part = blanks(1)[0];
      world.scatter(part, parts, root);
      expect_rank(part, me);
      auto exchanged = blanks(world.size());
      world.all_to_all(exchanged, std::vector<at::Tensor>(static_cast<size_t>(world.size()), of_rank(me)));
      for (int rank = 0; rank < world.size(); ++rank) expect_rank(exchanged[rank], rank);

      if (world.size() > 1 && me < 2) {
        auto message = me == 0 ? of_rank(0) : blanks(1)[0];
        me == 0 ? world.send(message, 1) : world.recv(message, 0);
        expect_rank(message, 0);
      }
      expect_error<UsageError>([&] { world.all_reduce(of_rank(me)); }, "sum is not defined for",
                               c10::isComplexType(dtype) ? "view_as_real" : "docs/collectives.md");
    }
  });
}

// Random calls on random shapes, the same on every rank, each compared with a plain loop.
TEST_P(ConformanceOnce, RandomCallsOnRandomShapesAgreeWithAPlainLoop) {
  const char* count = std::getenv("LOCKSTEP_TEST_RANDOM_CALLS");
  int calls = count ? std::atoi(count) : 60;
  on_every_rank([&](ProcessGroup world) {
    std::mt19937 random(20261115);
    auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    const at::ScalarType dtypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte,
                                     at::kChar,  at::kShort,  at::kInt,  at::kLong,     at::kBool};
    for (int call = 0; call < calls; ++call) {
      auto dtype = dtypes[below(10)];
      auto ops = reduce_ops_for(dtype);
      auto op = ops[below(static_cast<int>(ops.size()))];
      std::vector<int64_t> sizes;
      for (int d = below(4); d > 0; --d) sizes.push_back(below(below(8) == 0 ? 90 : 12));
      int root = below(world.size());
      uint64_t key = static_cast<uint64_t>(call);
      auto tensor = here(values_of(world.rank(), dtype, sizes, key));
      auto everyone = values_of_all(world.size(), dtype, sizes, key);
      auto stacked = sizes;
      stacked.insert(stacked.begin(), world.size());
      switch (below(5)) {
        case 0:
          world.all_reduce(tensor, op);
          EXPECT_TRUE(same_values(tensor, reduced(everyone, op))) << "call " << call;
          break;
        case 1:
          world.broadcast(tensor, root);
          EXPECT_TRUE(same_values(tensor, everyone[root])) << "call " << call;
          break;
        case 2: {
          auto output = here(at::zeros(stacked, dtype));
          world.all_gather(output, tensor);
          EXPECT_TRUE(same_values(output, at::stack(everyone))) << "call " << call;
          break;
        }
        case 3: {
          auto output = here(at::zeros(sizes, dtype));
          world.reduce_scatter(output, here(values_of(world.rank(), dtype, stacked, key)), op);
          auto expected = reduced(values_of_all(world.size(), dtype, stacked, key), op)[world.rank()];
          EXPECT_TRUE(same_values(output, expected)) << "call " << call;
          break;
        }
        case 4:
          world.reduce(tensor, root, op);
          EXPECT_TRUE(same_values(tensor, world.rank() == root ? reduced(everyone, op) : everyone[world.rank()]))
              << "call " << call;
          break;
      }
    }
  });
}

TEST_P(ConformanceOnce, LargeTensorsGoInPieces) {
  on_every_rank([&](ProcessGroup world) {
    int64_t n = (9 << 20) / 4 + 5;  // several pieces for each rank, and a remainder
    auto tensor = here(values_of(world.rank(), at::kFloat, {n}));
    world.all_reduce(tensor, ReduceOp::kAvg);
    EXPECT_TRUE(same_values(tensor, reduced(values_of_all(world.size(), at::kFloat, {n}), ReduceOp::kAvg)));
    world.broadcast(tensor.fill_(world.rank()), world.size() - 1);
    EXPECT_TRUE(same_values(tensor, at::full_like(tensor, world.size() - 1)));
  });
}

TEST_P(ConformanceOnce, EveryRankGetsTheSameBitsEveryTime) {
  on_every_rank([&](ProcessGroup world) {
    for (int64_t n : {100, 70001}) {
      at::Tensor first;
      for (int run = 0; run < 100; ++run) {
        auto tensor = here(values_of(world.rank(), at::kFloat, {n}));
        world.all_reduce(tensor, ReduceOp::kAvg);
        auto everyone = here(at::zeros({world.size(), n}));
        world.all_gather(everyone, tensor);
        for (int r = 0; r < world.size(); ++r) EXPECT_TRUE(same_values(everyone[r], tensor)) << "rank " << r;
        if (run == 0) first = tensor;
        EXPECT_TRUE(same_values(first, tensor)) << "run " << run;
      }
    }
  });
}

TEST_P(ConformanceOnce, MinAndMaxOfANanIsNan) {
  on_every_rank([&](ProcessGroup world) {
    for (auto op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (int culprit = 0; culprit < world.size(); ++culprit) {
        auto tensor = here(at::full({3}, static_cast<float>(world.rank())));
        if (world.rank() == culprit) tensor[1] = std::nan("");
        world.all_reduce(tensor, op);
        EXPECT_FALSE(tensor.isnan()[0].item<bool>());
        EXPECT_TRUE(tensor.isnan()[1].item<bool>());
      }
    }
  });
}

TEST_P(ConformanceOnce, AHalfSumIsRoundedOnceAndAnAverageDoesNotOverflow) {
  on_every_rank([&](ProcessGroup world) {
    auto big = here(at::full({2000}, 60000.0, at::kHalf));
    world.all_reduce(big, ReduceOp::kAvg);
    EXPECT_TRUE(at::allclose(big.to(at::kCPU, at::kFloat), at::full({2000}, 60000.0f), 1e-3));
    // 2048 + 1 + 1 + ...: each addend alone is lost to rounding in half precision.
    auto tensor = here(at::full({2000}, world.rank() == 0 ? 2048.0 : 1.0, at::kHalf));
    world.all_reduce(tensor);
    EXPECT_TRUE(same_values(tensor, at::full({2000}, 2048.0 + world.size() - 1, at::kFloat).to(at::kHalf)));
  });
}

// Asking must neither wait nor break anything, however long the other rank takes.
TEST_P(ConformanceOnce, AMessageCanBeAskedWhetherItIsDone) {
  on_every_rank([&](ProcessGroup world) {
    if (world.size() == 1) return;
    if (world.rank() == 0) {
      auto early = here(at::zeros({1000}));
      auto receive = world.recv_async(early, 1, 5);
      EXPECT_FALSE(receive.is_done());
      world.send(here(at::ones({1})), 1);  // only now may rank 1 begin
      while (!receive.is_done()) std::this_thread::yield();
      receive.wait();
      EXPECT_TRUE(same_values(early, at::ones({1000})));
    } else if (world.rank() == 1) {
      auto go = here(at::zeros({1}));
      world.recv(go, 0);
      auto sent = world.send_async(here(at::ones({1000})), 0, 5);
      while (!sent.is_done()) std::this_thread::yield();
      sent.wait();
    }
    world.barrier();
  });
}

// Ranks as threads only: they can see how many of them have come.
TEST_P(ConformanceOnce, ABarrierWaitsForEveryRank) {
  std::atomic<int> came{0};
  on_every_rank([&](ProcessGroup world) {
    for (int round = 1; round <= 50; ++round) {
      ++came;
      world.barrier();
      EXPECT_GE(came.load(), round * world.size());
      world.barrier();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceOnce, testing::ValuesIn(once_cases()), name_of_case);

/// Tensors of more than 2^31 bytes, which int32 arithmetic anywhere would break. Needs about 9 GiB.
class BeyondTwoGigabytes : public ConformanceOnce {};

TEST_P(BeyondTwoGigabytes, TensorsArriveWhole) {
  on_every_rank([&](ProcessGroup world) {
    int64_t n = (int64_t{1} << 31) + 4097;
    auto tensor = here(at::full({n}, world.rank() + 1, at::kByte));
    tensor[n - 1] = 10 * (world.rank() + 1);
    world.all_reduce(tensor);
    EXPECT_EQ(tensor[n - 1].item<int>(), 30);
    EXPECT_TRUE(tensor.narrow(0, 0, n - 1).eq(3).all().item<bool>());
    tensor.fill_(world.rank());
    world.broadcast(tensor, 1);
    EXPECT_TRUE(tensor.eq(1).all().item<bool>());
    if (world.rank() == 0)
      world.send(tensor.fill_(9), 1);
    else
      world.recv(tensor, 0);
    EXPECT_TRUE(tensor.eq(9).all().item<bool>());
  });
}

std::vector<Case> two_rank_cases() {
  std::vector<Case> cases;
  for (const auto& c : once_cases())
    if (c.size == 2) cases.push_back(c);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, BeyondTwoGigabytes, testing::ValuesIn(two_rank_cases()), name_of_case);

}  // namespace
}  // namespace lockstep
