#pragma once

#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "parallel/ddp/bucket.h"

namespace lockstep {

/// Copies of marks from a device to the host, in the order of their reductions. No copy blocks the host. Not
/// thread-safe.
class DeferredMarks {
 public:
  /// Copies the marks when the work that was submitted to the current stream so far has finished.
  void add(const at::Tensor& marks);
  /// Removes the oldest copy and returns it as float32. Blocks the host until the copy has arrived. Returns an
  /// undefined tensor if there is none. The result is valid until the next add().
  at::Tensor take();

 private:
  struct Copy {
    at::Tensor memory;                    // pinned
    std::optional<c10::Event> arrival{};  // not set on a CPU, where the copy is complete at once
  };
  std::deque<Copy> under_way_{};
  std::vector<Copy> free_{};  // for reuse
};

/// Informs every rank which parameters got a gradient on some rank, got none on some rank, or were frozen on some rank,
/// whether a gradient is not finite, and whether the ranks agree on static_graph. These marks follow the gradients in
/// the last bucket and are averaged with them: a mark above zero means "on some rank", in any floating-point type. Not
/// thread-safe.
class UnusedParameterBitmap {
 public:
  explicit UnusedParameterBitmap(size_t parameters);

  int64_t elements() const { return 3 * static_cast<int64_t>(used_somewhere_.size()) + 3; }

  /// Writes this rank's marks into the bucket. Call it before the bucket is reduced. A parameter is used, frozen, or
  /// neither.
  void write(Bucket& bucket, const std::vector<char>& used, const std::vector<char>& frozen, bool is_finite,
             bool is_static_graph);

  /// Reads the averaged marks. Call it after the bucket was reduced. On a GPU the host waits for the marks.
  void read_marks(const Bucket& bucket);
  /// Copies the marks for a later read_deferred_marks(), without a host wait. Until then the marks are those of a
  /// reduction in which all ranks had the marks of this rank. Precondition: this rank used every parameter that it had
  /// not frozen.
  void defer(const Bucket& bucket);
  /// Assumes the marks of a reduction in which all ranks had the marks of this rank, and never reads the real marks.
  void assume_equal_marks();
  /// Reads the marks of the oldest deferred reduction. Blocks the host until they have arrived. Returns false if there
  /// is none.
  bool read_deferred_marks();

  /// According to the marks that were read last.
  bool used_somewhere(size_t parameter) const { return used_somewhere_[parameter] != 0; }
  bool unused_somewhere(size_t parameter) const { return unused_somewhere_[parameter] != 0; }
  /// Frozen on some ranks and trained on other ranks, in the same reduction.
  bool frozen_differs(size_t parameter) const { return frozen_differs_[parameter] != 0; }
  bool is_not_finite_somewhere() const { return is_not_finite_somewhere_; }
  bool static_graph_differs() const { return static_graph_differs_; }

 private:
  void take(const at::Tensor& marks);

  std::vector<char> used_somewhere_;
  std::vector<char> unused_somewhere_;
  std::vector<char> frozen_differs_;
  bool is_not_finite_somewhere_ = false;
  bool static_graph_differs_ = false;
  /// The values that determine the marks: used, frozen, is_finite, is_static_graph.
  using Pattern = std::tuple<std::vector<char>, std::vector<char>, bool, bool>;
  std::map<Pattern, at::Tensor>
      written_;  // marks that were converted or moved: the next copy need not wait for the host
  DeferredMarks deferred_;
};

}  // namespace lockstep
