#include <lockstep/run_threads.h>

#include <mutex>
#include <system_error>
#include <thread>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/text.h"
#include "comm/group/group.h"
#include "comm/setup/init_process_group.h"

namespace lockstep {
namespace {

/// Records the first error and breaks the groups of all ranks when it occurs.
class FirstFailure {
 public:
  void joined(const std::shared_ptr<detail::Group>& group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(group);
    if (error_) group->abort(consequence());
  }

  /// The rank has returned. Drops the group, so that it is destroyed with the last handle and ranks that still need it
  /// get an error.
  void returned(const std::shared_ptr<detail::Group>& group) {
    std::lock_guard lock(mutex_);
    std::erase(groups_, group);
  }

  void failed(int rank, std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = error;
    rank_ = rank;
    for (const auto& group : groups_) group->watch().mark_broken(consequence());
    for (const auto& group : groups_) group->watch().wake();
  }

  void rethrow() {
    while (!groups_.empty()) groups_.pop_back();  // rank 0, which hosts the store, last
    if (!error_) return;
    std::string prefix = text("rank ", rank_, ": ");
    rethrow_with_prefix(error_, rank_of(error_) == rank_ ? "" : prefix, "", rank_);
  }

 private:
  std::exception_ptr consequence() const {
    return std::make_exception_ptr(PeerError(text("rank ", rank_, " failed: ", without_rank(message_of(error_), rank_)),
                                             {}, Culprit{rank_, CulpritRole::kGaveUp}));
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<detail::Group>> groups_;  // guarded by mutex_
  std::exception_ptr error_;                            // guarded by mutex_ until the threads are joined
  int rank_ = 0;                                        // guarded by mutex_ until the threads are joined
};

}  // namespace

void run_threads(int world_size, const std::function<void(ProcessGroup)>& rank_main, const RunThreadsOptions& options) {
  if (world_size < 1) throw UsageError(text("run_threads: world_size is ", world_size, "; it must be at least 1"));
  auto store = make_memory_store();
  FirstFailure failure;
  std::vector<std::thread> ranks;
  auto start = [&](int rank) {
    ranks.emplace_back([&, rank] {
      try {
        auto group = detail::init_group({.backend = options.backend,
                                         .rank = rank,
                                         .world_size = world_size,
                                         .timeout = options.timeout,
                                         .store = store});
        failure.joined(group);
        rank_main(ProcessGroup(group));
        failure.returned(group);
      } catch (...) {
        failure.failed(rank, std::current_exception());
      }
    });
  };
  for (int rank = 0; rank < world_size; ++rank) {
    try {
      start(rank);
    } catch (const std::system_error& error) {
      failure.failed(rank, std::make_exception_ptr(SystemError(text("cannot start a thread: ", error.what()))));
      break;
    }
  }
  for (auto& rank : ranks) rank.join();
  failure.rethrow();
}

}  // namespace lockstep
