#pragma once

namespace lockstep::detail {

/// What stands behind a Work. Thread-safe.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void wait() = 0;
  virtual bool is_done() = 0;
};

}  // namespace lockstep::detail
