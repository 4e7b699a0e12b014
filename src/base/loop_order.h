#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace lockstep::detail {

// ThreadSanitizer does not see how LibTorch's threads, which are OpenMP's, begin and end a parallel loop. These two
// tell it: all before the loop happens before each part, and each part happens before all after the loop. All loops
// share two marks, so that a part can announce itself before it reads anything. In other builds they do nothing.

/// Exists while a parallel loop runs, on the thread that calls it. Construct it after all that the parts read, the
/// function object that is called for them included.
class ParallelLoop {
 public:
#if defined(__SANITIZE_THREAD__)
  ParallelLoop() {
    __tsan_release(&begin_mark);
  }
  ~ParallelLoop() {
    __tsan_acquire(&end_mark);
  }
#else
  ParallelLoop() {}
#endif
  ParallelLoop(const ParallelLoop&) = delete;
  ParallelLoop& operator=(const ParallelLoop&) = delete;

  /// Exists while a part of the loop runs, on its thread. The first variable of the part.
  class Part {
   public:
#if defined(__SANITIZE_THREAD__)
    Part() {
      __tsan_acquire(&begin_mark);
    }
    ~Part() {
      __tsan_release(&end_mark);
    }
#else
    Part() {}
#endif
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;
  };

#if defined(__SANITIZE_THREAD__)
 private:
  static inline char begin_mark = 0, end_mark = 0;
#endif
};

}  // namespace lockstep::detail
