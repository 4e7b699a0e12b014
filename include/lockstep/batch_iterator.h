#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>

namespace lockstep {

/// Input iterator over the batches of one loop over a loader. Not thread-safe.
template <class Loader>
class BatchIterator {
 public:
  using Batch = typename Loader::Batch;
  using iterator_category = std::input_iterator_tag;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using pointer = Batch*;
  using reference = Batch&;

  Batch& operator*() const { return *batch_; }
  Batch* operator->() const { return batch_.get(); }
  BatchIterator& operator++() {
    batch_.reset();
    batch_ = loader_->next(loop_);
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return !batch_; }

 private:
  friend Loader;
  BatchIterator(Loader* loader, uint64_t loop) : loader_(loader), loop_(loop) { ++*this; }

  Loader* loader_;
  uint64_t loop_;
  std::shared_ptr<Batch> batch_{};
};

}  // namespace lockstep
