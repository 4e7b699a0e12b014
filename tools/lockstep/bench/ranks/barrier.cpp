#include "bench/ranks/barrier.h"

#include <chrono>
#include <utility>

#include "bench/sizes.h"

namespace lockstep::bench {
namespace {

constexpr auto kLate = std::chrono::microseconds(200);

class Barrier final : public Side {
 public:
  Barrier(ProcessGroup group, CommonPage& page) : group_(std::move(group)), page_(page) {}

  void prepare(int64_t turn) override { turn_ = turn; }

  void warm_up() override { group_.barrier(); }

  void run() override {
    for (int call = 0; call < calls_per_sample(0); ++call) group_.barrier();
  }

  int64_t count_wrong() override {
    page_.meet();  // all start at the same time, but for one
    if (turn_ % group_.size() == group_.rank()) come_late();
    page_.post(turn_);
    group_.barrier();
    int64_t wrong = 0;
    for (int rank = 0; rank < group_.size(); ++rank)
      if (page_.posted(rank) != turn_) wrong = 1;
    page_.meet();  // all have looked
    return wrong;
  }

 private:
  static void come_late() {
    const auto end = std::chrono::steady_clock::now() + kLate;
    while (std::chrono::steady_clock::now() < end) continue;
  }

  const ProcessGroup group_;
  CommonPage& page_;
  int64_t turn_ = 0;
};

}  // namespace

std::unique_ptr<Side> make_barrier(const ProcessGroup& group, CommonPage& page) {
  return std::make_unique<Barrier>(group, page);
}

}  // namespace lockstep::bench
