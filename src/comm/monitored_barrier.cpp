#include <algorithm>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/deadline.h"
#include "base/log.h"
#include "base/text.h"
#include "base/wait_notice.h"
#include "comm/group/group.h"
#include "comm/watch/straggler_report.h"

// Every rank sets a key in the store. The first rank that sees all keys, or times out, writes the verdict, which is
// valid for all ranks. So no rank passes a barrier at which another rank timed out.

namespace lockstep {
namespace {

constexpr const char* kPassed = "passed";

void print_wait(detail::Group& group, const detail::CallRecord& record, int64_t seconds) {
  const auto& me = group.membership();
  const auto answers = group.job()->ask(me.name, describe(record.call_id));
  if (!lower_rank_also_waits(me, answers))
    log_warning(text(describe_me(me), ": ", describe(record), " has waited for ", seconds, " s. ",
                     describe_stragglers(me, record.call_id, answers)));
}

// Waits in short intervals, to notice when the group breaks. Returns whether all ranks arrived before the deadline.
bool wait_for_all(detail::Group& group, const detail::CallRecord& record, Store& store,
                  const std::vector<std::string>& marks, Deadline deadline) {
  constexpr auto kPollInterval = std::chrono::milliseconds(200);
  WaitNotice notice;
  for (;;) {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    try {
      store.wait(marks, std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(1), kPollInterval));
      return true;
    } catch (const TimeoutError&) {
      group.check_working();
      if (left <= kPollInterval) return false;
      if (const auto now = std::chrono::steady_clock::now(); notice.is_due(now))
        print_wait(group, record, notice.seconds(now));
    }
  }
}

std::string verdict_of(detail::Group& group, const std::string& call_id, std::chrono::milliseconds timeout,
                       const detail::CallRecord& record) {
  const auto& me = group.membership();
  auto store = with_prefix(group.job()->store(), text("group/", me.name, "/", call_id, "/"));
  std::vector<std::string> marks;
  for (int rank = 0; rank < me.size; ++rank) marks.push_back(std::to_string(rank));
  store->set(marks[me.rank], "");
  std::string verdict = kPassed;
  if (!wait_for_all(group, record, *store, marks, deadline_after(timeout))) {
    verdict = text(describe(record), " was not reached by all ranks within ", timeout.count(), " ms. ",
                   describe_stragglers(me, record.call_id, group.job()->ask(me.name, call_id)));
  }
  verdict = store->compare_set("verdict", "", verdict);
  if (store->add("seen", 1) == me.size) {  // no rank reads the keys any more
    for (const auto& mark : marks) store->erase(mark);
    store->erase("verdict");
    store->erase("seen");
  }
  return verdict;
}

}  // namespace

void ProcessGroup::monitored_barrier(const CallOptions& options) const {
  auto& group = member();
  if (size() == 1) return;
  group.run_unordered(detail::Operation::kMonitoredBarrier, options,
                      [&](const detail::CallRecord& record, std::chrono::milliseconds timeout) {
                        auto verdict = verdict_of(group, describe(record.call_id), timeout, record);
                        if (verdict != kPassed)
                          throw TimeoutError(text(describe_me(group.membership()), ": ", verdict),
                                             group.membership().rank, {});
                      });
}

}  // namespace lockstep
