#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace lockstep::bench {

/// Memory shared by all ranks, to start samples together and to compare times without using the backends that are
/// measured. The functions are collective unless noted. Only one thread per rank may call them.
class SharedPage {
 public:
  /// Maps a zeroed file of page_bytes(ranks). Throws SystemError on failure. `oversubscribed`: there are more ranks
  /// than cores, so that a waiting rank yields at once.
  SharedPage(const std::string& path, int rank, int ranks, bool oversubscribed);
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  int rank() const { return rank_; }

  /// Blocks until all ranks have called it. Spins, so that all ranks return at nearly the same time.
  void barrier() { barrier(spins_); }
  /// The same, but waiting ranks sleep; takes microseconds longer.
  void sleeping_barrier();

  /// Not collective: stores a number for the other ranks; reads the number stored by a rank.
  void publish(int64_t number) { lines_[kFirstRank + rank_].value.store(static_cast<uint64_t>(number)); }
  int64_t published(int rank) const { return static_cast<int64_t>(lines_[kFirstRank + rank].value.load()); }

  /// The maximum over all ranks.
  double max(double value);
  /// The sum over all ranks.
  int64_t sum(int64_t value);
  /// The value of rank 0.
  int64_t broadcast(int64_t value);

  /// The mean round-trip time of a flag between rank 0 and rank 1, measured on rank 0 over `times` round trips. 0 with
  /// one rank.
  double round_trip_us(int times);

 private:
  enum Place { kArrived, kGeneration, kPing, kPong, kFirstRank = 8 };
  struct alignas(128) CacheLine {  // two cache lines: processors prefetch adjacent lines
    std::atomic<uint64_t> value;
  };

  void barrier(int spins);
  bool arrive(uint64_t generation);
  void wait_until(const CacheLine& line, uint64_t value, int spins) const;

  const int rank_;
  const int ranks_;
  const int spins_;  // number of polls before yielding
  CacheLine* lines_ = nullptr;
};

}  // namespace lockstep::bench
