#include "parallel/ddp/logging_data.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/text.h"

namespace lockstep {

void StepRecorder::begin_forward() {
  std::lock_guard lock(mutex_);
  forward_begin_ = StepTimes::Clock::now();
}

void StepRecorder::end_forward() {
  std::lock_guard lock(mutex_);
  forward_end_ = StepTimes::Clock::now();
}

void StepRecorder::add(StepTimes step) {
  std::lock_guard lock(mutex_);
  step.number = ++count_;
  step.forward_begin = std::exchange(forward_begin_, {});
  step.forward_end = std::exchange(forward_end_, {});
  if (steps_.size() == kKept) steps_.pop_front();
  steps_.push_back(std::move(step));
}

std::vector<StepTimes> StepRecorder::steps() const {
  std::lock_guard lock(mutex_);
  return {steps_.begin(), steps_.end()};
}

namespace {

using Clock = StepTimes::Clock;
using Span = std::pair<Clock::time_point, Clock::time_point>;

double in_milliseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

double microseconds(Clock::time_point time) {
  return std::chrono::duration<double, std::micro>(time.time_since_epoch()).count();
}

/// Returns how long at least one reduction was running between `from` and `to`.
double under_way_ms(const StepTimes& step, Clock::time_point from, Clock::time_point to) {
  std::vector<Span> spans;
  for (const auto& bucket : step.buckets)
    spans.push_back({std::max(bucket.started, from), std::min(bucket.reduced, to)});
  std::sort(spans.begin(), spans.end());
  double sum = 0;
  auto end = from;
  for (const auto& [begin, stop] : spans) {
    if (stop > std::max(begin, end)) sum += in_milliseconds(stop - std::max(begin, end));
    end = std::max(end, stop);
  }
  return sum;
}

template <class... Arguments>
std::string print(const char* format, Arguments... arguments) {
  char line[256];
  std::snprintf(line, sizeof line, format, arguments...);
  return line;
}

std::string size_text(int64_t bytes) {
  if (bytes < 10 << 10) return print("%lld B", static_cast<long long>(bytes));
  if (bytes < 10 << 20) return print("%.1f KiB", static_cast<double>(bytes) / (1 << 10));
  return print("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

/// Returns a complete event ("ph": "X") of the trace format.
std::string event(const std::string& name, int rank, int track, Clock::time_point begin, Clock::time_point end) {
  return text(
      "{\"name\":\"", name, "\",\"ph\":\"X\",\"pid\":", rank, ",\"tid\":", track,
      print(",\"ts\":%.3f,\"dur\":%.3f}", microseconds(begin), std::max(0.0, in_milliseconds(end - begin) * 1000)));
}

std::string name_event(const char* what, const std::string& name, int rank, int track) {
  return text("{\"name\":\"", what, "\",\"ph\":\"M\",\"pid\":", rank, ",\"tid\":", track, ",\"args\":{\"name\":\"",
              name, "\"}}");
}

}  // namespace

void describe_step(const StepTimes& step, DdpLoggingData& data) {
  auto since_begin = [&](Clock::time_point time) { return in_milliseconds(time - step.backward_begin); };
  data.steps = step.number;
  data.forward_ms = in_milliseconds(step.forward_end - step.forward_begin);
  data.backward_ms = since_begin(step.backward_end);
  data.exposed_ms = in_milliseconds(step.backward_end - step.computed);
  data.reduction_ms = under_way_ms(step, step.backward_begin, step.backward_end);
  const double hidden = under_way_ms(step, step.backward_begin, step.computed);
  data.overlap = data.reduction_ms > 0 ? hidden / data.reduction_ms : 0;
  data.buckets.clear();
  for (const auto& bucket : step.buckets)
    data.buckets.push_back({bucket.gradients, bucket.bytes, since_begin(bucket.full), since_begin(bucket.started),
                            since_begin(bucket.reduced)});
}

std::string DdpLoggingData::to_table() const {
  std::string result =
      text(module, " on rank ", rank, " of ", world_size, " over ", backend, ": ", parameters, " parameters, ",
           size_text(bytes), " of gradients, ", steps, " steps", is_static_graph ? ", static graph" : "", '\n');
  if (steps == 0) return result;
  result += print(
      "last step: forward %.3f ms, backward %.3f ms (%.3f ms of it waiting), reductions %.3f ms (%.0f %% overlapped "
      "with computation)\n",
      forward_ms, backward_ms, exposed_ms, reduction_ms, overlap * 100);
  result += print("%8s %10s %12s %10s %10s %10s\n", "bucket", "gradients", "size", "full ms", "start ms", "done ms");
  for (size_t i = 0; i < buckets.size(); ++i)
    result +=
        print("%8zu %10zu %12s %10.3f %10.3f %10.3f\n", i, buckets[i].gradients, size_text(buckets[i].bytes).c_str(),
              buckets[i].full_ms, buckets[i].started_ms, buckets[i].reduced_ms);
  return result;
}

std::string trace_events(int rank, const std::vector<StepTimes>& steps) {
  constexpr int kCompute = 0, kBuckets = 1;
  std::vector<std::string> events{name_event("process_name", text("rank ", rank), rank, kCompute),
                                  name_event("thread_name", "compute", rank, kCompute),
                                  name_event("thread_name", "buckets", rank, kBuckets)};
  for (const auto& step : steps) {
    if (step.forward_end > step.forward_begin)
      events.push_back(event(text("forward ", step.number), rank, kCompute, step.forward_begin, step.forward_end));
    events.push_back(event(text("backward ", step.number), rank, kCompute, step.backward_begin, step.backward_end));
    events.push_back(event("wait", rank, kCompute, step.computed, step.backward_end));
    auto free = step.backward_begin;  // buckets are reduced one after another
    for (size_t i = 0; i < step.buckets.size(); ++i) {
      const auto& bucket = step.buckets[i];
      events.push_back(event(text("bucket ", i, ", ", size_text(bucket.bytes)), rank, kBuckets,
                             std::max(bucket.started, free), bucket.reduced));
      free = std::max(free, bucket.reduced);
    }
  }
  std::string result;
  for (const auto& item : events) result += (result.empty() ? "" : ",\n") + item;
  return result;
}

std::string trace_file(const std::vector<std::string>& events_of_ranks) {
  std::string result = "{\"traceEvents\":[\n";
  for (size_t i = 0; i < events_of_ranks.size(); ++i) result += (i == 0 ? "" : ",\n") + events_of_ranks[i];
  return result + "\n]}\n";
}

}  // namespace lockstep
