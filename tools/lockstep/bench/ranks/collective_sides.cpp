#include "bench/ranks/collective_sides.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <lockstep/error.h>

#include "bench/operation.h"
#include "bench/ranks/pattern.h"
#include "bench/ranks/rounds.h"

namespace lockstep::bench {
namespace {

constexpr size_t kHugePage = 2 << 20;

/// Uses two streams: a single stream leaves a third of the bandwidth of some processors unused.
void scale(float* __restrict first, float* __restrict second, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    first[i] *= factor;
    second[i] *= factor;
  }
}

constexpr int kRoot = 0;

/// The tensors of one call. For in-place collectives both are the same tensor.
struct Slot {
  at::Tensor input;
  at::Tensor output;
};

class Collective final : public Side {
 public:
  Collective(const CollectivePlan& plan, ProcessGroup group, Memory memory, int64_t bytes)
      : operation_(plan.operation),
        group_(std::move(group)),
        dtype_(dtype_named(plan.dtype)),
        op_(reduce_op_named(plan.redop)),
        count_(element_count(operation_, bytes, element_bytes(plan.dtype), group_.size())),
        slots_(static_cast<size_t>(calls_per_sample(bytes))) {
    make_buffers(memory);
    if (plan.check) make_tables();
  }

  void prepare(int64_t seed) override {
    seed_ = seed;
    for (size_t call = 0; call < slots_.size(); ++call) write_pattern(slots_[call].input, input_, offset_of(call));
  }

  void warm_up() override {
    call(slots_[0]);
    synchronize();
  }

  void run() override {
    for (const auto& slot : slots_) call(slot);
    synchronize();
  }

  int64_t count_wrong() override {
    int64_t wrong = 0;
    for (size_t call = 0; call < slots_.size(); ++call) wrong += count_wrong_of(slots_[call].output, offset_of(call));
    return wrong;
  }

 private:
  void make_buffers(Memory memory) {
    const int64_t parts = group_.size();
    if (operation_ == Operation::kReduceScatter) {
      fill_slots(memory, parts * count_, &Slot::input);
      fill_slots(memory, count_, &Slot::output);
    } else if (operation_ == Operation::kAllGather) {
      fill_slots(memory, count_, &Slot::input);
      fill_slots(memory, parts * count_, &Slot::output);
    } else {
      fill_slots(memory, count_, &Slot::input);
      for (auto& slot : slots_) slot.output = slot.input;
    }
    input_ = input_table(group_.rank(), dtype_, op_);
  }

  void fill_slots(Memory memory, int64_t count, at::Tensor Slot::*tensor) {
    const auto calls = static_cast<int64_t>(slots_.size());
    const int64_t stride = slot_stride(count, static_cast<int64_t>(c10::elementSize(dtype_)), static_cast<int>(calls));
    const auto buffer = memory == Memory::kAllocated
                            ? group_.allocate({stride * calls}, dtype_)
                            : at::empty({stride * calls}, at::TensorOptions(dtype_).device(group_.device()));
    for (int64_t call = 0; call < calls; ++call)
      slots_[static_cast<size_t>(call)].*tensor = buffer.narrow(0, call * stride, count);
  }

  void make_tables() {
    if (reduces(operation_)) {
      expected_ = {reduced_table(group_.size(), dtype_, op_)};
    } else if (operation_ == Operation::kBroadcast) {
      expected_ = {input_table(kRoot, dtype_, op_)};
    } else {
      for (int rank = 0; rank < group_.size(); ++rank) expected_.push_back(input_table(rank, dtype_, op_));
    }
  }

  /// Differs in every call of every sample, so that stale data from an earlier call counts as wrong.
  int64_t offset_of(size_t call) const { return seed_ * 97 + static_cast<int64_t>(call) * 13; }

  void call(const Slot& slot) const {
    switch (operation_) {
      case Operation::kAllReduce:
        return group_.all_reduce(slot.input, op_);
      case Operation::kReduceScatter:
        return group_.reduce_scatter(slot.output, slot.input, op_);
      case Operation::kAllGather:
        return group_.all_gather(slot.output, slot.input);
      case Operation::kBroadcast:
        return group_.broadcast(slot.input, kRoot);
      case Operation::kBarrier:
        return;  // make_barrier
    }
  }

  /// On a GPU a call returns before its result is complete.
  void synchronize() const {
    if (group_.device().is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(group_.device().index());
  }

  int64_t count_wrong_of(const at::Tensor& output, int64_t offset) const {
    if (operation_ == Operation::kReduceScatter) offset += group_.rank() * count_;
    if (operation_ != Operation::kAllGather)
      return expected_.empty() ? 0 : bench::count_wrong(output, expected_[0], offset, tolerance_of(dtype_, op_));
    int64_t wrong = 0;
    for (size_t rank = 0; rank < expected_.size(); ++rank)
      wrong +=
          bench::count_wrong(output.narrow(0, static_cast<int64_t>(rank) * count_, count_), expected_[rank], offset);
    return wrong;
  }

  const Operation operation_;
  const ProcessGroup group_;
  const at::ScalarType dtype_;
  const ReduceOp op_;
  const int64_t count_;
  std::vector<Slot> slots_;           // constant after construction
  at::Tensor input_;                  // constant after construction
  std::vector<at::Tensor> expected_;  // constant after construction; for all-gather one per rank
  int64_t seed_ = 0;
};

constexpr auto kDelay = std::chrono::microseconds(200);

class Barrier final : public Side {
 public:
  Barrier(ProcessGroup group, SharedPage& page) : group_(std::move(group)), page_(page) {}

  void prepare(int64_t seed) override { seed_ = seed; }

  void warm_up() override { group_.barrier(); }

  void run() override {
    for (int call = 0; call < calls_per_sample(0); ++call) group_.barrier();
  }

  int64_t count_wrong() override {
    page_.barrier();  // all ranks start together, except for the late rank
    if (seed_ % group_.size() == group_.rank()) delay();
    page_.publish(seed_);
    group_.barrier();
    int64_t wrong = 0;
    for (int rank = 0; rank < group_.size(); ++rank)
      if (page_.published(rank) != seed_) wrong = 1;
    page_.barrier();  // all ranks have read
    return wrong;
  }

 private:
  static void delay() {
    const auto end = std::chrono::steady_clock::now() + kDelay;
    while (std::chrono::steady_clock::now() < end) continue;
  }

  const ProcessGroup group_;
  SharedPage& page_;
  int64_t seed_ = 0;
};

}  // namespace

MemoryStream::MemoryStream(int64_t bytes, int calls)
    : count_(std::max<int64_t>(1, bytes / static_cast<int64_t>(sizeof(float)))),
      stride_(slot_stride(count_, sizeof(float), calls)),
      calls_(calls),
      mapped_bytes_((static_cast<size_t>(stride_ * calls) * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage) {
  void* memory = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw SystemError(fmt::format("mmap of {} bytes: {}", mapped_bytes_, std::strerror(errno)));
  ::madvise(memory, mapped_bytes_, MADV_HUGEPAGE);  // the floor should not include TLB misses of small pages
  memory_ = static_cast<float*>(memory);
}

MemoryStream::~MemoryStream() {
  ::munmap(memory_, mapped_bytes_);
}

void MemoryStream::prepare(int64_t seed) {
  std::fill_n(memory_, stride_ * calls_, static_cast<float>(seed % 100));
}

void MemoryStream::run() {
  for (int call = 0; call < calls_; ++call) stream(memory_ + call * stride_);
}

void MemoryStream::stream(float* slot) const {
  volatile float one = 1;  // volatile, or the compiler would remove the loop
  const float factor = one;
  const int64_t half = count_ / 2;
  scale(slot, slot + half, half, factor);
  if (count_ % 2 != 0) slot[count_ - 1] *= factor;
}

std::unique_ptr<Side> make_collective(const CollectivePlan& plan, const ProcessGroup& group, Memory memory,
                                      int64_t bytes) {
  return std::make_unique<Collective>(plan, group, memory, bytes);
}

bool has_own_memory(const ProcessGroup& group) {
  const auto deleter = [](const at::Tensor& tensor) { return tensor.storage().data_ptr().get_deleter(); };
  const auto ordinary = at::empty({4096}, at::TensorOptions(at::kByte).device(group.device()));
  return deleter(group.allocate({4096}, at::kByte)) != deleter(ordinary);
}

std::unique_ptr<Side> make_barrier(const ProcessGroup& group, SharedPage& page) {
  return std::make_unique<Barrier>(group, page);
}

}  // namespace lockstep::bench
