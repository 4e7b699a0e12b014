#include <lockstep/backend.h>

#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "support/messages.h"

namespace lockstep {
namespace {

/// What a third party might bring: one rank, and a record of what it was asked.
struct Record {
  std::vector<std::string> calls;
  std::vector<std::thread::id> threads;
  std::vector<bool> contiguous;
};

class RecordingBackend final : public Backend {
 public:
  explicit RecordingBackend(Record& record) : record_(record) {}

  at::Tensor allocate(int64_t bytes) override {
    record_.calls.push_back("allocate " + std::to_string(bytes));
    return at::empty({bytes}, at::kByte);
  }
  void abort(std::exception_ptr) noexcept override { record_.calls.push_back("abort"); }
  void all_reduce(const at::Tensor& data, ReduceOp, const CallInfo&) override {
    note("all_reduce", data);
    if (data.numel() == 13) throw std::runtime_error("thirteen");
  }
  void reduce(const at::Tensor& data, ReduceOp, int, const CallInfo&) override { note("reduce", data); }
  void broadcast(const at::Tensor& data, int, const CallInfo&) override { note("broadcast", data); }
  void all_gather(const at::Tensor& output, const at::Tensor&, const CallInfo&) override { note("all_gather", output); }
  void reduce_scatter(const at::Tensor& output, const at::Tensor&, ReduceOp, const CallInfo&) override {
    note("reduce_scatter", output);
  }
  void all_to_all_v(const std::vector<at::Tensor>&, const std::vector<at::Tensor>&, const CallInfo&) override {
    record_.calls.push_back("all_to_all_v");
  }
  void barrier(const CallInfo&) override { record_.calls.push_back("barrier"); }
  std::unique_ptr<Transfer> start_send(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }
  std::unique_ptr<Transfer> start_recv(const at::Tensor&, int, uint32_t, uint64_t) override { return nullptr; }

 private:
  void note(const char* call, const at::Tensor& data) {
    record_.calls.push_back(call);
    record_.threads.push_back(std::this_thread::get_id());
    record_.contiguous.push_back(data.is_contiguous());
  }
  Record& record_;
};

ProcessGroup group_with(Record& record, const std::string& name) {
  register_backend(name, [&record](const BackendContext&) { return std::make_unique<RecordingBackend>(record); });
  return init_process_group({.backend = name, .rank = 0, .world_size = 1});
}

TEST(Backend, AThirdPartysIsUsedByItsName) {
  Record record;
  auto world = group_with(record, "recording_1");
  EXPECT_EQ(world.backend_name(), "recording_1");
  world.barrier();
  world.broadcast(at::ones({3}), 0);
  world.allocate({2, 3}, at::kDouble);
  EXPECT_EQ(record.calls, (std::vector<std::string>{"barrier", "broadcast", "allocate 48"}));
}

TEST(Backend, NamesAreGivenOnce) {
  Record record;
  group_with(record, "recording_2");
  expect_error<UsageError>([] { register_backend("recording_2", {}); }, "already", "recording_2");
  expect_error<UsageError>([] { register_backend("threads", {}); }, "already", "threads");
  expect_error<UsageError>([] { register_backend("auto", {}); }, "auto");
  expect_error<UsageError>([] { register_backend("cpu:x", {}); }, "cpu:x");
}

TEST(Backend, SeesDenseTensorsOnly) {
  Record record;
  auto world = group_with(record, "recording_3");
  world.all_reduce(at::ones({4, 6}).t());
  world.all_reduce(at::ones({}));
  world.all_gather(at::ones({6, 4}).t(), at::ones({6, 4}).t());
  EXPECT_EQ(record.contiguous, (std::vector<bool>{true, true, true}));
}

// Ranks that make different calls are told so for empty tensors, too.
TEST(Backend, OnlyComparesCallsOnEmptyTensors) {
  Record record;
  auto world = group_with(record, "recording_4");
  world.all_reduce(at::empty({0}));
  world.broadcast(at::empty({3, 0}), 0);
  world.reduce_scatter(at::empty({0}), at::empty({0}));
  EXPECT_EQ(record.calls, (std::vector<std::string>{"barrier", "barrier", "barrier"}));
}

TEST(Backend, SynchronousCallsRunOnTheCallersThreadAndAsynchronousOnesElsewhere) {
  Record record;
  auto world = group_with(record, "recording_5");
  auto tensor = at::ones({2});
  world.all_reduce(tensor);
  world.all_reduce_async(tensor).wait();
  world.all_reduce_async(tensor).wait();
  world.all_reduce(tensor);
  auto here = std::this_thread::get_id();
  EXPECT_EQ(record.threads[0], here);
  EXPECT_NE(record.threads[1], here);
  EXPECT_EQ(record.threads[1], record.threads[2]);
  EXPECT_EQ(record.threads[3], here);
}

TEST(Backend, AFailureBreaksTheGroupOnceAndForAll) {
  Record record;
  auto world = group_with(record, "recording_6");
  expect_error<std::runtime_error>([&] { world.all_reduce(at::ones({13})); }, "thirteen");
  expect_error<Error>([&] { world.broadcast(at::ones({2}), 0); }, "broadcast", "broken by an earlier error",
                      "thirteen");
  EXPECT_EQ(record.calls, (std::vector<std::string>{"all_reduce", "abort"}));
}

}  // namespace
}  // namespace lockstep
