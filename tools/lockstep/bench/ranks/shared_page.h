#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace lockstep::bench {

/// A page of memory that all ranks have in common: by it they start together and compare times, so that nothing of what
/// is measured takes part in the measuring. The functions are collective unless they say otherwise; one
/// thread of a rank calls them.
class SharedPage {
 public:
  /// Maps a file of page_bytes(ranks), zeros at first. SystemError when that fails. `oversubscribed`: there are more
  /// ranks than cores, so that who waits should let others run at once.
  SharedPage(const std::string& path, int rank, int ranks, bool oversubscribed);
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  int rank() const { return rank_; }

  /// Returns when all ranks have called it, on all of them at nearly the same time.
  void barrier() { barrier(spins_); }
  /// The same, but who waits sleeps and leaves its core to others; it takes microseconds longer.
  void sleeping_barrier();

  /// Not collective: leaves a number for the others to see; and the one that a rank has left.
  void publish(int64_t number) { lines_[kFirstRank + rank_].value.store(static_cast<uint64_t>(number)); }
  int64_t published(int rank) const { return static_cast<int64_t>(lines_[kFirstRank + rank].value.load()); }

  /// The largest of what the ranks give, on every rank.
  double max(double mine);
  /// The sum of what the ranks give, on every rank.
  int64_t sum(int64_t mine);
  /// What rank 0 gives, on every rank.
  int64_t broadcast(int64_t mine);

  /// How long a flag takes from rank 0 to rank 1 and back, in microseconds on rank 0, from so many in a row. With one
  /// rank: 0.
  double round_trip_us(int times);

 private:
  enum Place { kArrived, kGeneration, kPing, kPong, kFirstRank = 8 };
  struct alignas(128) CacheLine {  // two cache lines: processors fetch neighbours together
    std::atomic<uint64_t> value;
  };

  void barrier(int spins);
  bool arrive(uint64_t generation);
  void wait_until(const CacheLine& line, uint64_t value, int spins) const;

  const int rank_;
  const int ranks_;
  const int spins_;  // how often to look before letting others run
  CacheLine* lines_ = nullptr;
};

}  // namespace lockstep::bench
