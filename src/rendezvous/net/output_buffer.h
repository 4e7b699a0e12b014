#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

/// Bytes that are still to be sent. A large message is sent in many parts, so remove() seldom moves the rest.
class OutputBuffer {
 public:
  void append(std::string_view bytes) { bytes_ += bytes; }
  /// Removes the first bytes.
  void remove(size_t count) {
    begin_ += count;
    if (begin_ <= bytes_.size() / 2) return;
    bytes_.erase(0, begin_);
    begin_ = 0;
  }

  const char* data() const { return bytes_.data() + begin_; }
  size_t size() const { return bytes_.size() - begin_; }
  bool empty() const { return size() == 0; }

 private:
  std::string bytes_{};
  size_t begin_ = 0;
};

}  // namespace lockstep
