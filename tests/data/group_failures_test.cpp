// A failure of one rank reaches all ranks of a GroupLoader's groups. Six ranks, in three layouts: one group that
// scatters, one group that broadcasts, and both: rank 0 scatters to ranks 0 and 3, which broadcast to 0, 1, 2 and 3, 4,
// 5. Rank 0 reads in all of them.

#include <atomic>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/group_loader.h>
#include <lockstep/run_threads.h>

namespace lockstep {
namespace {

using testing::AllOf;
using testing::Each;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int kRanks = 6;
constexpr size_t kSamples = 36, kBatchSize = 3;

enum class Layout { kScatter, kBroadcast, kBoth };
constexpr Layout kLayouts[] = {Layout::kScatter, Layout::kBroadcast, Layout::kBoth};

// What one rank of a layout needs.
struct Place {
  Place(Layout layout, const ProcessGroup& all)
      : world(all), three(all.new_subgroups(3)), firsts(all.new_group({0, 3})) {
    if (layout == Layout::kScatter) {
      groups.scatter = world;
      replica = world.rank();
      replicas = kRanks;
    } else if (layout == Layout::kBroadcast) {
      groups.broadcast = world;
    } else {
      groups = {.scatter = firsts, .broadcast = three};
      replica = world.rank() / 3;
      replicas = 2;
    }
  }

  DistributedSampler sampler() const {
    DistributedSampler sampler(kSamples, replica, replicas, {.seed = 3});
    sampler.set_epoch(0);  // otherwise a second loop would warn
    return sampler;
  }
  size_t steps() const { return kSamples / (static_cast<size_t>(replicas) * kBatchSize); }

  // Every group still works.
  void expect_groups_work() const {
    EXPECT_EQ(world.all_reduce(1), kRanks);
    EXPECT_EQ(three.all_reduce(1), 3);
    EXPECT_EQ(firsts.contains_me() ? firsts.all_reduce(1) : 2, 2);
  }

  ProcessGroup world, three, firsts;
  ReadingGroups groups{};
  int replica = 0, replicas = 1;
};

// Runs on the thread of the rank whose batches are unpacked.
thread_local std::function<void()> on_receive;

struct Letter {
  torch::Tensor data;
};

// Throws in the epoch in which it is told to.
struct Letters {
  Letter get(size_t index) const {
    on_read(index);
    return {torch::tensor(static_cast<int64_t>(index))};
  }
  torch::optional<size_t> size() const { return kSamples; }
  std::function<void(size_t)> on_read = [](size_t) {};
};

Letter stack_letters(std::vector<Letter> letters) {
  std::vector<torch::Tensor> data;
  for (const auto& letter : letters) data.push_back(letter.data);
  return {torch::stack(data)};
}

}  // namespace

template <>
struct BatchTraits<Letter> {
  static void write(BatchWriter& to, const Letter& letter) { to.write(letter.data); }
  static Letter read(BatchReader& from) {
    if (on_receive) on_receive();
    return {from.read<torch::Tensor>()};
  }
};

template <>
struct TensorsIn<Letter> {
  static constexpr bool kAny = true;
  template <class Visit>
  static void visit(Letter& letter, const Visit& function) {
    TensorsIn<torch::Tensor>::visit(letter.data, function);
  }
};

namespace {

constexpr ErrorKind kKinds[] = {ErrorKind::kError,    ErrorKind::kUsage,      ErrorKind::kPeer,  ErrorKind::kTimeout,
                                ErrorKind::kMismatch, ErrorKind::kCheckpoint, ErrorKind::kSystem};

[[noreturn]] void throw_kind(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
      throw UsageError("it broke");
    case ErrorKind::kPeer:
      throw PeerError("it broke");
    case ErrorKind::kTimeout:
      throw TimeoutError("it broke");
    case ErrorKind::kMismatch:
      throw MismatchError("it broke");
    case ErrorKind::kCheckpoint:
      throw CheckpointError("it broke");
    case ErrorKind::kSystem:
      throw SystemError("it broke");
    case ErrorKind::kError:
      throw std::runtime_error("it broke");
  }
  throw std::logic_error("no such kind");
}

// The error that each rank caught. It has a class, a kind, a rank and a message.
struct Caught {
  std::string error = "no error";
  std::optional<int> rank{};
  std::optional<Culprit> culprit{};
  bool has_nested = false;
};

Caught caught_in(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const Error& error) {
    return {std::string(name_of(error.kind())) + ": " + error.what(), error.rank(), error.culprit(),
            dynamic_cast<const std::nested_exception*>(&error) != nullptr};
  }
}

class Catches {
 public:
  void note(int rank, Caught caught) { caught_[static_cast<size_t>(rank)] = std::move(caught); }
  std::vector<std::string> errors() const {
    std::vector<std::string> errors;
    for (const auto& each : caught_) errors.push_back(each.error);
    return errors;
  }
  const Caught& operator[](int rank) const { return caught_[static_cast<size_t>(rank)]; }
  // All ranks threw the same: this class, a message that begins with this rank and ends like this.
  void expect(ErrorKind kind, int rank, const std::string& end) const {
    EXPECT_THAT(errors(), Each(caught_.front().error));
    EXPECT_THAT(caught_.front().error,
                AllOf(StartsWith(std::string(name_of(kind)) + ": rank " + std::to_string(rank) + ": GroupLoader: "),
                      EndsWith(end)));
    for (const auto& each : caught_) EXPECT_EQ(each.rank, rank);
  }

 private:
  std::vector<Caught> caught_ = std::vector<Caught>(kRanks);
};

std::vector<torch::Tensor> data_of(auto& loader) {
  std::vector<torch::Tensor> all;
  for (auto& batch : loader) all.push_back(batch.data.clone());
  return all;
}

void expect_whole_epoch(auto& loader, const Place& place) {
  const auto sampler = loader.sampler();
  const auto got = data_of(loader);
  ASSERT_EQ(got.size(), place.steps());
  std::vector<int64_t> expected;
  for (const size_t index : distributed_indices(kSamples, place.replica, place.replicas, {.seed = 3}, sampler.epoch()))
    expected.push_back(static_cast<int64_t>(index));
  EXPECT_TRUE(torch::equal(torch::cat(got), torch::tensor(expected)));
}

// The samples of the second step of a layout's rank, "samples 3 9 15".
std::string second_samples(int replica, int replicas, int64_t epoch) {
  const auto indices = distributed_indices(kSamples, replica, replicas, {.seed = 3}, epoch);
  std::string named = "samples";
  for (size_t i = kBatchSize; i < 2 * kBatchSize; ++i) named += " " + std::to_string(indices[i]);
  return named;
}

TEST(GroupFailures, EveryKindOfErrorOfTheReaderReachesAllRanks) {
  for (const auto layout : kLayouts)
    for (const int workers : {0, 1}) {
      std::vector<Catches> catches(std::size(kKinds));
      std::vector<size_t> broken(std::size(kKinds));
      run_threads(kRanks, [&](ProcessGroup world) {
        const Place place(layout, world);
        auto sampler = place.sampler();
        const auto broken_at = std::make_shared<std::atomic<size_t>>(kSamples);
        const auto kind = std::make_shared<std::atomic<ErrorKind>>();
        const auto open = [=] {
          return Letters{[=](size_t index) {
            if (index == *broken_at) throw_kind(*kind);
          }};
        };
        GroupLoader loader(open, sampler, place.groups, stack_letters,
                           {.batch_size = kBatchSize, .num_workers = workers});
        for (size_t i = 0; i < std::size(kKinds); ++i) {
          const auto epoch = static_cast<int64_t>(i);
          sampler.set_epoch(epoch);
          // In the second step of the last replica.
          const auto indices = distributed_indices(kSamples, place.replicas - 1, place.replicas, {.seed = 3}, epoch);
          *kind = kKinds[i];
          *broken_at = indices[kBatchSize + 1];
          if (world.rank() == 0) broken[i] = *broken_at;
          size_t delivered = 0;
          catches[i].note(world.rank(), caught_in([&] {
                            for ([[maybe_unused]] auto& batch : loader) ++delivered;
                          }));
          EXPECT_EQ(delivered, 1u);
          EXPECT_EQ(sampler.position(), kBatchSize) << "the sampler points to the batch that failed";
          place.expect_groups_work();
          *broken_at = kSamples;
          expect_whole_epoch(loader, place);
        }
      });
      for (size_t i = 0; i < std::size(kKinds); ++i) {
        catches[i].expect(kKinds[i], 0, "sample " + std::to_string(broken[i]) + ": it broke");
        EXPECT_THAT(catches[i][0].error, HasSubstr(": DataLoader: epoch " + std::to_string(i) + ": sample "));
        EXPECT_EQ(catches[i][5].culprit, (Culprit{0, CulpritRole::kGaveUp}));
      }
    }
}

TEST(GroupFailures, EveryKindOfErrorOfAReceiverReachesAllRanks) {
  for (const auto layout : kLayouts)
    for (const int failing : {0, 3, 5}) {
      std::vector<Catches> catches(std::size(kKinds));
      std::string where;
      run_threads(kRanks, [&](ProcessGroup world) {
        const Place place(layout, world);
        auto sampler = place.sampler();
        GroupLoader loader([] { return Letters(); }, sampler, place.groups, stack_letters, {.batch_size = kBatchSize});
        sampler.set_epoch(4);
        if (world.rank() == failing) where = second_samples(place.replica, place.replicas, 4);
        for (size_t i = 0; i < std::size(kKinds); ++i) {
          size_t delivered = 0;
          on_receive = [&] {
            if (delivered == 1 && world.rank() == failing) throw_kind(kKinds[i]);
          };
          catches[i].note(world.rank(), caught_in([&] {
                            for ([[maybe_unused]] auto& batch : loader) ++delivered;
                          }));
          EXPECT_EQ(delivered, 1u);
          EXPECT_EQ(sampler.position(), kBatchSize) << "the sampler points to the batch that failed";
          place.expect_groups_work();
          on_receive = nullptr;
          expect_whole_epoch(loader, place);
        }
      });
      for (size_t i = 0; i < std::size(kKinds); ++i)
        catches[i].expect(kKinds[i], failing, "epoch 4: " + where + ": cannot deliver the batch: it broke");
      for (int rank = 0; rank < kRanks; ++rank)
        EXPECT_EQ(catches[0][rank].has_nested, rank == failing) << "the original exception is nested where it was";
    }
}

TEST(GroupFailures, ReachAllRanksThroughSharedMemory) {
  Catches catches;
  run_threads(kRanks,
              [&](ProcessGroup world) {
                const Place place(Layout::kBoth, world);
                auto sampler = place.sampler();
                GroupLoader loader([] { return Letters(); }, sampler, place.groups, stack_letters,
                                   {.batch_size = kBatchSize});
                if (world.rank() == 5) on_receive = [] { throw SystemError("it broke"); };
                catches.note(world.rank(), caught_in([&] { data_of(loader); }));
                on_receive = nullptr;
                place.expect_groups_work();
                expect_whole_epoch(loader, place);
              },
              {.backend = "shm"});
  catches.expect(ErrorKind::kSystem, 5, "it broke");
}

TEST(GroupFailures, TheLowestOfSeveralFailingRanksIsReported) {
  for (const auto layout : kLayouts) {
    Catches catches;
    run_threads(kRanks, [&](ProcessGroup world) {
      const Place place(layout, world);
      GroupLoader loader([] { return Letters(); }, place.sampler(), place.groups, stack_letters,
                         {.batch_size = kBatchSize});
      if (world.rank() == 2) on_receive = [] { throw SystemError("a"); };
      if (world.rank() == 4) on_receive = [] { throw UsageError("b"); };
      catches.note(world.rank(), caught_in([&] { data_of(loader); }));
      on_receive = nullptr;
    });
    catches.expect(ErrorKind::kSystem, 2, ": cannot deliver the batch: a");
  }
}

// Refuses tensors of 1 MiB and more on threads that say so.
class LimitedMemory final : public c10::Allocator {
 public:
  LimitedMemory() { c10::SetCPUAllocator(this); }
  ~LimitedMemory() override { c10::SetCPUAllocator(allocator_); }
  LimitedMemory(const LimitedMemory&) = delete;
  LimitedMemory& operator=(const LimitedMemory&) = delete;

  static inline thread_local int allowed = -1;  // how many large tensors this thread may still allocate; -1: any number

  // LibTorch before 2.3 declares it const.
  c10::DataPtr allocate(size_t bytes) const { return limited(bytes); }  // NOLINT
  c10::DataPtr allocate(size_t bytes) { return limited(bytes); }        // NOLINT
  c10::DeleterFnPtr raw_deleter() const override { return allocator_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }  // NOLINT

 private:
  c10::DataPtr limited(size_t bytes) const {
    if (bytes >= (1 << 20) && allowed >= 0 && allowed-- == 0) throw std::bad_alloc();
    return allocator_->allocate(bytes);
  }
  c10::Allocator* const allocator_ = c10::GetCPUAllocator();
};

TEST(GroupFailures, ARankWithoutMemoryForABatchFailsOnAllRanks) {
  struct Large {
    torch::Tensor get(size_t) const { return torch::ones({1 << 19}, torch::kByte); }
  };
  const LimitedMemory memory;
  for (const auto layout : kLayouts)
    for (const int failing : {3, 5})
      for (const int allowed : {0, 1}) {  // 0: no buffer for the bytes, 1: no memory for the tensor
        Catches catches;
        run_threads(kRanks, [&](ProcessGroup world) {
          const Place place(layout, world);
          GroupLoader loader([] { return Large(); }, place.sampler(), place.groups, {.batch_size = kBatchSize});
          if (world.rank() == failing) LimitedMemory::allowed = allowed;
          const auto loop = [&] {
            for (torch::Tensor& batch : loader) EXPECT_EQ(batch.sum().item<int64_t>(), 3 << 19);
          };
          catches.note(world.rank(), caught_in(loop));
          LimitedMemory::allowed = -1;
          place.expect_groups_work();
          loop();
        });
        catches.expect(ErrorKind::kError, failing, "bad_alloc");
        EXPECT_THAT(catches[0].error, HasSubstr(allowed == 0 ? "bytes for a batch: " : "cannot deliver the batch: "));
      }
}

TEST(GroupFailures, ACopyToADeviceThatFailsOnOneRankFailsOnAllRanks) {
  for (const auto layout : kLayouts) {
    Catches catches;
    run_threads(kRanks, [&](ProcessGroup world) {
      const Place place(layout, world);
      DataLoaderOptions options{.batch_size = kBatchSize};
      if (world.rank() == 4) options.device = torch::Device(torch::kXLA, 0);  // no kernels of it are loaded
      GroupLoader loader([] { return Letters(); }, place.sampler(), place.groups, stack_letters, options);
      for ([[maybe_unused]] int loop : {1, 2}) {
        catches.note(world.rank(), caught_in([&] { data_of(loader); }));
        place.expect_groups_work();
      }
    });
    catches.expect(ErrorKind::kError, 4, "");
    EXPECT_THAT(catches[0].error, AllOf(HasSubstr("cannot deliver the batch"), HasSubstr("XLA")));
  }
}

TEST(GroupFailures, BatchesOfAnotherTypeOnOneRankAreAMismatchOnAllRanks) {
  const auto with_count = [](std::vector<Letter> letters) { return std::pair(letters.size(), stack_letters(letters)); };
  Catches catches;
  run_threads(kRanks, [&](ProcessGroup world) {
    const Place place(Layout::kBoth, world);
    const auto open = [] { return Letters(); };
    catches.note(world.rank(), caught_in([&] {
                   if (world.rank() != 5) {
                     GroupLoader loader(open, place.sampler(), place.groups, stack_letters, {.batch_size = 3});
                     data_of(loader);
                   } else {
                     GroupLoader loader(open, place.sampler(), place.groups, with_count, {.batch_size = 3});
                     for ([[maybe_unused]] auto& batch : loader) {
                     }
                   }
                 }));
    place.expect_groups_work();
  });
  catches.expect(ErrorKind::kMismatch, 5, "expected a number, found a tensor; use the same type of batch on all ranks");
}

TEST(GroupFailures, EveryKindOfErrorOfOpeningReachesAllRanks) {
  for (const auto layout : kLayouts) {
    std::vector<Catches> catches(std::size(kKinds));
    run_threads(kRanks, [&](ProcessGroup world) {
      const Place place(layout, world);
      for (size_t i = 0; i < std::size(kKinds); ++i) {
        const auto open = [&]() -> Letters { throw_kind(kKinds[i]); };
        catches[i].note(world.rank(),
                        caught_in([&] { GroupLoader loader(open, place.sampler(), place.groups, stack_letters, {}); }));
        place.expect_groups_work();
      }
      GroupLoader loader([] { return Letters(); }, place.sampler(), place.groups, stack_letters,
                         {.batch_size = kBatchSize});
      expect_whole_epoch(loader, place);
    });
    for (size_t i = 0; i < std::size(kKinds); ++i)
      catches[i].expect(kKinds[i], 0, "rank 0: GroupLoader: cannot open the dataset: it broke");
  }
}

TEST(GroupFailures, OneReaderOfSeveralFailsForItsOwnGroupOnly) {
  std::vector<std::string> errors(kRanks);
  run_threads(kRanks, [&](ProcessGroup world) {
    const auto three = world.new_subgroups(3);
    const auto open = [&] {
      if (world.rank() == 3) throw SystemError("not mounted");
      return Letters();
    };
    errors[static_cast<size_t>(world.rank())] =
        caught_in([&] {
          GroupLoader loader(open, DistributedSampler(kSamples, world), {.scatter = three}, stack_letters,
                             {.batch_size = kBatchSize});
          EXPECT_EQ(data_of(loader).size(), 2u);
        }).error;
    EXPECT_EQ(world.all_reduce(1), kRanks);
    EXPECT_EQ(three.all_reduce(1), 3);
  });
  const std::string error = "SystemError: rank 3: GroupLoader: cannot open the dataset: not mounted";
  EXPECT_THAT(errors, testing::ElementsAre("no error", "no error", "no error", error, error, error));
}

TEST(GroupFailures, InvalidOptionsOfOneRankAreRefusedByAllRanks) {
  struct Names {
    std::string get(size_t index) const { return std::to_string(index); }
  };
  for (const auto layout : kLayouts)
    for (const int failing : {0, 3, 5}) {
      Catches workers, device;
      run_threads(kRanks, [&](ProcessGroup world) {
        const Place place(layout, world);
        DataLoaderOptions options{.batch_size = kBatchSize, .num_workers = world.rank() == failing ? -1 : 1};
        workers.note(world.rank(), caught_in([&] {
                       GroupLoader loader([] { return Letters(); }, place.sampler(), place.groups, stack_letters,
                                          options);
                     }));
        options.num_workers = 0;
        if (world.rank() == failing) options.device = torch::kCPU;
        device.note(world.rank(), caught_in([&] {
                      GroupLoader loader([] { return Names(); }, place.sampler(), place.groups, options);
                    }));
        place.expect_groups_work();
      });
      workers.expect(ErrorKind::kUsage, failing, "DataLoader: num_workers is -1, expected 0 or more");
      device.expect(ErrorKind::kUsage, failing, "or copy batches in the loop");
    }
}

TEST(GroupFailures, AnEpochThatCannotBeginOnOneRankFailsOnAllRanks) {
  for (const auto layout : kLayouts) {
    Catches catches;
    run_threads(kRanks, [&](ProcessGroup world) {
      const Place place(layout, world);
      const SampleOrder order("by hand", [fails = world.rank() == 5](int64_t epoch) {
        if (fails && epoch == 1) throw SystemError("no list");
        std::vector<size_t> samples(kSamples);
        for (size_t i = 0; i < kSamples; ++i) samples[i] = i;
        return samples;
      });
      DistributedSampler sampler(order, kSamples, place.replica, place.replicas);
      GroupLoader loader([] { return Letters(); }, sampler, place.groups, stack_letters, {.batch_size = kBatchSize});
      sampler.set_epoch(1);
      catches.note(world.rank(), caught_in([&] { loader.begin(); }));
      place.expect_groups_work();
      sampler.set_epoch(2);
      EXPECT_EQ(data_of(loader).size(), place.steps());
    });
    catches.expect(ErrorKind::kSystem, 5, "rank 5: GroupLoader: cannot begin epoch 1: no list");
  }
}

TEST(GroupFailures, ASamplerThatOneRankMovedIsRefusedByAllRanks) {
  for (const auto layout : kLayouts)
    for (const int failing : {0, 5}) {
      Catches catches;
      run_threads(kRanks, [&](ProcessGroup world) {
        const Place place(layout, world);
        auto sampler = place.sampler();
        GroupLoader loader([] { return Letters(); }, sampler, place.groups, stack_letters, {.batch_size = kBatchSize});
        catches.note(world.rank(), caught_in([&] {
                       for ([[maybe_unused]] auto& batch : loader)
                         if (world.rank() == failing) sampler.next(1);
                     }));
        place.expect_groups_work();
        expect_whole_epoch(loader, place);
      });
      catches.expect(ErrorKind::kUsage, failing,
                     "its sampler was moved during the loop from position 3 to 4 (next(), reset() or load() was "
                     "called); use one sampler for each loader");
    }
}

TEST(GroupFailures, AStepOfAnEarlierLoopOnAllRanksLeavesTheNewLoopAlone) {
  for (const auto layout : kLayouts) {
    Catches catches;
    run_threads(kRanks, [&](ProcessGroup world) {
      const Place place(layout, world);
      GroupLoader loader([] { return Letters(); }, place.sampler(), place.groups, stack_letters,
                         {.batch_size = kBatchSize});
      auto first = loader.begin();
      auto second = loader.begin();
      catches.note(world.rank(), caught_in([&] { ++first; }));
      std::vector<torch::Tensor> got;
      for (; second != loader.end(); ++second) got.push_back(second->data);
      const auto own = distributed_indices(kSamples, place.replica, place.replicas, {.seed = 3}, 0);
      ASSERT_EQ(got.size(), place.steps());
      EXPECT_EQ(got[1][0].item<int64_t>(), static_cast<int64_t>(own[kBatchSize]));
      EXPECT_THROW(++first, UsageError) << "also after the end of the second";
    });
    catches.expect(ErrorKind::kUsage, 0, "another loop over this loader has started; use one loader for each loop");
  }
}

TEST(GroupFailures, AStepOfAnEarlierLoopOnOneRankEndsTheLoopOnAllRanks) {
  for (const auto layout : kLayouts)
    for (const int failing : {0, 5}) {
      Catches catches;
      run_threads(kRanks, [&](ProcessGroup world) {
        const Place place(layout, world);
        GroupLoader loader([] { return Letters(); }, place.sampler(), place.groups, stack_letters,
                           {.batch_size = kBatchSize});
        auto first = loader.begin();
        auto second = loader.begin();
        catches.note(world.rank(), caught_in([&] { ++(world.rank() == failing ? first : second); }));
        ++second;  // not collective: the loop is over
        EXPECT_TRUE(second == loader.end());
        place.expect_groups_work();
        expect_whole_epoch(loader, place);
      });
      catches.expect(ErrorKind::kUsage, failing,
                     "another loop over this loader has started; use one loader for each loop");
    }
}

}  // namespace
}  // namespace lockstep
