#pragma once

#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "parallel/ddp/bucket.h"

namespace lockstep {

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

  /// Reads the averaged marks. Call it after the bucket was reduced. On a GPU the host waits for the marks only if
  /// `now` is true. Otherwise they are copied asynchronously every few calls, and a later call reads them; in such
  /// reductions this rank used every parameter that it had not frozen.
  void learn(const Bucket& bucket, bool now);

  /// According to the marks that were read last.
  bool used_somewhere(size_t parameter) const { return used_somewhere_[parameter] != 0; }
  bool unused_somewhere(size_t parameter) const { return unused_somewhere_[parameter] != 0; }
  /// Frozen on some ranks and trained on others, in the same reduction.
  bool frozen_differs(size_t parameter) const { return frozen_differs_[parameter] != 0; }
  bool is_not_finite_somewhere() const { return is_not_finite_somewhere_; }
  bool static_graph_differs() const { return static_graph_differs_; }

 private:
  void take(const at::Tensor& marks);
  void learn_later(const at::Tensor& marks);

  std::vector<char> used_somewhere_;
  std::vector<char> unused_somewhere_;
  std::vector<char> frozen_differs_;
  bool is_not_finite_somewhere_ = false;
  bool static_graph_differs_ = false;
  /// What marks depend on: used, frozen, is_finite, is_static_graph.
  using Pattern = std::tuple<std::vector<char>, std::vector<char>, bool, bool>;
  std::map<Pattern, at::Tensor>
      written_;                        // marks that were converted or moved: the next copy need not wait for the host
  int64_t reductions_ = 0;             // calls of learn_later()
  at::Tensor arriving_;                // GPU only: pinned host memory
  std::optional<c10::Event> arrival_;  // set while a copy to arriving_ is pending
};

}  // namespace lockstep
