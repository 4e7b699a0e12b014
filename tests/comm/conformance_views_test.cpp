// Tensors whose values are not those in their memory, and what a call tells those who watch a tensor's version.

#include <algorithm>
#include <complex>

#include <ATen/ATen.h>

#include "comm/conformance.h"

namespace lockstep {
namespace {

class ConformanceViews : public OnEveryRank {
 protected:
  /// Complex numbers of a rank. `key` selects the numbers.
  at::Tensor numbers(int rank, int64_t count = 6, uint64_t key = 0) const {
    const auto parts = values_of(rank, at::kFloat, {count, 2}, key).contiguous() + 0.5;
    return here(at::view_as_complex(parts));
  }
  at::Tensor blank(int64_t count = 6) const { return here(at::zeros({count}, at::kComplexFloat)); }
  std::vector<at::Tensor> blanks(int count) const {
    std::vector<at::Tensor> result;
    for (int i = 0; i < count; ++i) result.push_back(blank());
    return result;
  }
};

int64_t version_of(const at::Tensor& tensor) {
  return tensor._version();
}

TEST_P(ConformanceViews, ConjugatesAreSentAsTheirValues) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank(), size = world.size(), root = size - 1;
    const auto mine = numbers(me).conj();
    ASSERT_TRUE(mine.is_conj());
    const auto expect_rank = [&](const at::Tensor& got, int rank, const char* call) {
      EXPECT_TRUE(same_values(got.resolve_conj(), at::conj_physical(numbers(rank)))) << call << " of rank " << rank;
    };

    auto broadcast = me == root ? mine : blank();
    world.broadcast(broadcast, root);
    expect_rank(broadcast, root, "broadcast");
    auto several = me == root ? std::vector{mine, mine} : blanks(2);
    world.broadcast_coalesced(several, root);
    for (const auto& tensor : several) expect_rank(tensor, root, "broadcast_coalesced");

    auto whole = blank(6 * size);
    world.all_gather(whole, mine);
    for (int rank = 0; rank < size; ++rank) expect_rank(whole.narrow(0, 6 * rank, 6), rank, "all_gather");
    auto list = blanks(size);
    world.all_gather(list, mine);
    for (int rank = 0; rank < size; ++rank) expect_rank(list[rank], rank, "all_gather of a list");
    std::vector<at::Tensor> wholes{blank(6 * size), blank(6 * size)};
    world.all_gather_coalesced(wholes, {mine, mine});
    for (int rank = 0; rank < size; ++rank)
      for (const auto& one : wholes) expect_rank(one.narrow(0, 6 * rank, 6), rank, "all_gather_coalesced");

    auto gathered = me == root ? blanks(size) : std::vector<at::Tensor>();
    world.gather(gathered, mine, root);
    for (size_t rank = 0; rank < gathered.size(); ++rank) expect_rank(gathered[rank], static_cast<int>(rank), "gather");
    std::vector<at::Tensor> parts;
    for (int rank = 0; me == root && rank < size; ++rank) parts.push_back(numbers(rank).conj());
    auto part = blank();
    world.scatter(part, parts, root);
    expect_rank(part, me, "scatter");

    auto exchanged = blanks(size);
    world.all_to_all(exchanged, std::vector<at::Tensor>(static_cast<size_t>(size), mine));
    for (int rank = 0; rank < size; ++rank) expect_rank(exchanged[rank], rank, "all_to_all");
    auto rows = blank(6 * size);
    world.all_to_all(rows, mine.repeat({size}).conj().conj());
    for (int rank = 0; rank < size; ++rank) expect_rank(rows.narrow(0, 6 * rank, 6), rank, "all_to_all of rows");

    if (size > 1 && me < 2) {
      auto message = blank();
      me == 0 ? world.send(mine, 1) : world.recv(message, 0);
      if (me == 1) expect_rank(message, 0, "recv");
    }
    if (!device().is_cpu()) return;
    const auto objects = world.all_gather_object(mine);
    for (int rank = 0; rank < size; ++rank) expect_rank(objects[rank].toTensor(), rank, "all_gather_object");
  });
}

TEST_P(ConformanceViews, AConjugateReceivesValues) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank(), root = world.size() - 1;
    const auto memory = numbers(me, 6, 1), view = memory.conj();
    world.broadcast(me == root ? numbers(root) : view, root);
    if (me == root) return;
    EXPECT_TRUE(same_values(view.resolve_conj(), numbers(root)));
    EXPECT_TRUE(same_values(memory, at::conj_physical(numbers(root))));
  });
}

TEST_P(ConformanceViews, NegatedViewsAreSentAndReducedAsTheirValues) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank(), size = world.size();
    const auto real = [&](int rank) { return here(values_of(rank, at::kFloat, {8}, 3)); };
    const auto view = at::_neg_view(real(me));
    ASSERT_TRUE(view.is_neg());
    auto whole = here(at::zeros({8 * size}));
    world.all_gather(whole, view);
    for (int rank = 0; rank < size; ++rank)
      EXPECT_TRUE(same_values(whole.narrow(0, 8 * rank, 8), -real(rank))) << "of rank " << rank;

    // Sums of small integers do not depend on the order.
    const auto whole_numbers = [&](int rank) { return here(at::arange(8, at::kFloat) + rank); };
    auto expected = whole_numbers(0);
    for (int rank = 1; rank < size; ++rank) expected = expected + whole_numbers(rank);
    auto memory = whole_numbers(me);
    const auto summed = at::_neg_view(memory);
    world.all_reduce(summed);
    EXPECT_TRUE(same_values(memory, expected)) << "the sum of the negated values, negated";
    auto first = whole_numbers(me), second = whole_numbers(me);
    world.all_reduce_coalesced({at::_neg_view(first), second});
    EXPECT_TRUE(same_values(first, expected));
    EXPECT_TRUE(same_values(second, expected));
  });
}

TEST_P(ConformanceViews, ACallThatWritesATensorChangesItsVersion) {
  on_every_rank([&](ProcessGroup world) {
    const int me = world.rank(), size = world.size(), root = size - 1;
    const auto fresh = [&](int64_t count = 4) { return here(at::ones({count})); };
    /// Makes a call, which must change the versions of `written` and no others.
    const auto expect_writes = [&](const char* call, const std::vector<at::Tensor>& written,
                                   const std::vector<at::Tensor>& read, const std::function<void()>& make) {
      std::vector<int64_t> before;
      for (const auto& tensor : written) before.push_back(version_of(tensor));
      for (const auto& tensor : read) before.push_back(version_of(tensor));
      make();
      for (size_t i = 0; i < written.size(); ++i) EXPECT_GT(version_of(written[i]), before[i]) << call << ' ' << i;
      for (size_t i = 0; i < read.size(); ++i)
        EXPECT_EQ(version_of(read[i]), before[written.size() + i]) << call << ", input " << i;
    };
    const auto a = fresh(), b = fresh(), whole = fresh(4 * size);
    const auto list = [&] {
      std::vector<at::Tensor> result;
      for (int i = 0; i < size; ++i) result.push_back(fresh());
      return result;
    };
    const auto outputs = list(), inputs = list();
    const bool is_root = me == root;
    const std::vector<at::Tensor> none;

    expect_writes("all_reduce", {a}, {}, [&] { world.all_reduce(a); });
    expect_writes("reduce", is_root ? std::vector{a} : none, is_root ? none : std::vector{a},
                  [&] { world.reduce(a, root); });
    expect_writes("broadcast", is_root ? none : std::vector{a}, is_root ? std::vector{a} : none,
                  [&] { world.broadcast(a, root); });
    expect_writes("all_gather", {whole}, {a}, [&] { world.all_gather(whole, a); });
    expect_writes("all_gather of a list", outputs, {a}, [&] { world.all_gather(outputs, a); });
    expect_writes("gather", is_root ? outputs : none, {a}, [&] { world.gather(is_root ? outputs : none, a, root); });
    expect_writes("scatter", {a}, inputs, [&] { world.scatter(a, is_root ? inputs : none, root); });
    expect_writes("reduce_scatter", {a}, {whole}, [&] { world.reduce_scatter(a, whole); });
    expect_writes("reduce_scatter of a list", {a}, inputs, [&] { world.reduce_scatter(a, inputs); });
    expect_writes("all_to_all", outputs, inputs, [&] { world.all_to_all(outputs, inputs); });
    const auto rows = fresh(4 * size);
    expect_writes("all_to_all of rows", {rows}, {whole}, [&] { world.all_to_all(rows, whole); });

    expect_writes("all_reduce_coalesced", {a, b}, {}, [&] { world.all_reduce_coalesced({a, b}); });
    expect_writes("broadcast_coalesced", is_root ? none : std::vector{a, b}, is_root ? std::vector{a, b} : none, [&] {
      world.broadcast_coalesced({a, b}, root);
    });
    const auto other = fresh(4 * size);
    expect_writes("all_gather_coalesced", {whole, other}, {a, b}, [&] {
      world.all_gather_coalesced({whole, other}, {a, b});
    });
    expect_writes("reduce_scatter_coalesced", {a, b}, {whole, other}, [&] {
      world.reduce_scatter_coalesced({a, b}, {whole, other});
    });
    if (size > 1 && me == 0) expect_writes("send", {}, {a}, [&] { world.send(a, 1); });
    if (size > 1 && me == 1) expect_writes("recv", {a}, {}, [&] { world.recv(a, 0); });
  });
}

TEST_P(ConformanceViews, AnAsynchronousCallChangesVersionsWhenItIsSubmitted) {
  on_every_rank([&](ProcessGroup world) {
    const auto dense = here(at::ones({4}));
    const auto columns = here(at::ones({4, 4})).t();
    const auto several = std::vector{here(at::ones({4})), here(at::ones({3, 2})).t()};
    std::vector<at::Tensor> all{dense, columns, several[0], several[1]};
    std::vector<int64_t> before;
    for (const auto& tensor : all) before.push_back(version_of(tensor));
    const std::vector<Work> works{world.all_reduce_async(dense), world.all_reduce_async(columns),
                                  world.all_reduce_coalesced_async(several)};
    std::vector<int64_t> submitted;
    for (const auto& tensor : all) submitted.push_back(version_of(tensor));
    for (const auto& work : works) work.wait();
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_GT(submitted[i], before[i]) << i;
      EXPECT_EQ(version_of(all[i]), submitted[i]) << i;
    }
  });
}

TEST_P(ConformanceViews, TensorsOfInferenceModeCanBeWritten) {
  on_every_rank([&](ProcessGroup world) {
    at::Tensor tensor;
    {
      const c10::InferenceMode guard;
      tensor = here(at::ones({4}));
    }
    world.all_reduce(tensor);
    EXPECT_TRUE(same_values(tensor, at::full({4}, static_cast<double>(world.size()))));
  });
}

TEST_P(ConformanceViews, AutogradNoticesACallThatWritesASavedTensor) {
  on_every_rank([&](ProcessGroup world) {
    const auto weight = here(at::ones({4})).requires_grad_();
    const auto saved = here(at::ones({4}));
    const auto product = (weight * saved).sum();
    world.all_reduce(saved);
    try {
      product.backward();
      ADD_FAILURE() << "backward used a tensor that was overwritten";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("modified by an inplace operation"), std::string::npos) << error.what();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, ConformanceViews, testing::ValuesIn(once_cases()), name_of_case);

}  // namespace
}  // namespace lockstep
