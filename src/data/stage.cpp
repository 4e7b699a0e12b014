#include <lockstep/stage.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/log.h"
#include "base/rethrow.h"
#include "base/text.h"
#include "data/staging.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// How long a rank copies before it tells the others that it lives.
constexpr std::chrono::seconds kTurn(1);

fs::path target_of(const fs::path& source, const fs::path& folder) {
  auto normal = source.lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();  // it ended in a slash
  return folder / normal.filename();
}

// One rank's part: what it copies, and what went wrong.
class Part {
 public:
  explicit Part(const ProcessGroup& group) : group_(group) {}

  // Copies what is missing, if it is this rank's turn, while all ranks wait for those whose turn it is.
  void run(const fs::path& source, const fs::path& target, bool is_my_turn) {
    std::optional<Staging> staging;
    attempt([&] {
      if (!is_my_turn) return;
      staging.emplace(source, target);
      if (!staging->is_done())
        log_info(text("staging ", source, " to ", target, ": ", staging->missing_bytes(), " bytes"));
    });
    auto busy = at::empty({1}, at::kLong);
    do {
      const bool is_busy = staging && !staging->is_done() && error_.empty();
      busy.fill_(is_busy ? 1 : 0);
      if (is_busy) attempt([&] { staging->run_for(kTurn); });
      group_.all_reduce(busy);
    } while (busy.item<int64_t>() > 0);
  }

  // All ranks throw what any of them has met.
  void agree() const {
    const auto errors = group_.all_gather_object(c10::IValue(error_));
    std::string all;
    for (size_t rank = 0; rank < errors.size(); ++rank)
      if (const auto& error = errors[rank].toStringRef(); !error.empty())
        all += text(all.empty() ? "" : "; ", "rank ", rank, ": ", error);
    if (all.empty()) return;
    try {
      group_.barrier();  // one that leaves sooner would end the call in which the others hear it
    } catch (const Error&) {
      // they have more to worry about
    }
    throw SystemError(text("stage: ", all));
  }

 private:
  void attempt(const std::function<void()>& action) {
    try {
      action();
    } catch (...) {
      error_ = text("cannot be copied: ", message_of(std::current_exception()));  // never empty
    }
  }

  const ProcessGroup& group_;
  std::string error_{};
};

}  // namespace

fs::path stage(const ProcessGroup& group, const fs::path& source, const fs::path& folder) {
  const auto target = target_of(source, folder);
  Part part(group);
  part.run(source, target, group.local_rank() == 0);
  part.agree();
  part.run(source, target, true);  // ranks of one host need not see the same disk: in containers, for instance
  part.agree();
  return target;
}

}  // namespace lockstep
