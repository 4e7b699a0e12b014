#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "parallel/ddp/bucket.h"

namespace lockstep {

/// Tells every rank which parameters got a gradient on which ranks, and whether one is not finite: marks behind the
/// gradients of the last bucket. Averaged over the ranks, a mark above zero means "on some rank", in any floating-point
/// type. Not thread-safe.
class UnusedParameterBitmap {
 public:
  explicit UnusedParameterBitmap(size_t parameters);

  int64_t elements() const { return 2 * static_cast<int64_t>(used_somewhere_.size()) + 1; }

  /// Before the bucket is reduced: what this rank has to say.
  void write(Bucket& bucket, const std::vector<char>& used, bool is_finite);

  /// After it was. On a GPU the host waits for the marks only where this rank must know them now: otherwise it learns,
  /// every few calls, what has come from an earlier reduction, in which this rank used every parameter.
  void learn(const Bucket& bucket, bool now);

  /// In what was learnt last.
  bool used_somewhere(size_t parameter) const { return used_somewhere_[parameter] != 0; }
  bool unused_somewhere(size_t parameter) const { return unused_somewhere_[parameter] != 0; }
  bool is_not_finite_somewhere() const { return is_not_finite_somewhere_; }

 private:
  void take(const at::Tensor& marks);
  void learn_later(const at::Tensor& marks);

  std::vector<char> used_somewhere_;
  std::vector<char> unused_somewhere_;
  bool is_not_finite_somewhere_ = false;
  at::Tensor all_used_;                // where marks must be converted or moved: those of a rank that used all
  int64_t reductions_ = 0;             // of which this rank need not know at once
  at::Tensor arriving_;                // on a GPU: page-locked memory of the host
  std::optional<c10::Event> arrival_;  // while marks are on their way there
};

}  // namespace lockstep
