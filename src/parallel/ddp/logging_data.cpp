#include "parallel/ddp/logging_data.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/text.h"
#include "comm/capture.h"
#include "comm/torch_version.h"

namespace lockstep {

using Clock = std::chrono::steady_clock;

namespace {

constexpr int64_t kMeasuredFirst = 8;
constexpr int64_t kMeasureEvery = 16;

c10::Stream current_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

std::shared_ptr<const c10::Event> record_event(c10::Device device) {
  auto event = std::make_shared<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(current_stream_of(device));
  return event;
}

std::vector<Moment*> moments_of(StepTimes& step) {
  std::vector<Moment*> moments{&step.forward_begin, &step.forward_end, &step.backward_begin, &step.computed,
                               &step.backward_end};
  for (auto& bucket : step.buckets) moments.insert(moments.end(), {&bucket.full, &bucket.started, &bucket.reduced});
  return moments;
}

}  // namespace

bool StepRecorder::is_measuring() const {
  if (!device_.is_cuda()) return true;
  const auto number = count() + 1;
  const bool is_due = number <= kMeasuredFirst || number % kMeasureEvery == 0;
  return (is_due || !detail::kMeasuresEvents) && !detail::is_capturing(device_);
}

Moment StepRecorder::now() const {
  if (device_.is_cuda() && detail::kMeasuresEvents && is_measuring()) return {Clock::now(), record_event(device_)};
  return {Clock::now()};
}

// A separate stream waits for the call. The current stream continues to compute.
Moment StepRecorder::end_of(const Work& work) const {
  if (!device_.is_cuda()) return {work.done_at()};
  if (!detail::kMeasuresEvents || !is_measuring()) return now();
  const c10::impl::VirtualGuardImpl devices(device_.type());
  c10::StreamGuard side(devices.getStreamFromGlobalPool(device_));
  work.wait();
  return now();
}

void StepRecorder::begin_forward() {
  auto moment = now();
  std::lock_guard lock(mutex_);
  forward_begin_ = std::move(moment);
}

void StepRecorder::end_forward() {
  auto moment = now();
  std::lock_guard lock(mutex_);
  forward_end_ = std::move(moment);
}

void StepRecorder::add(StepTimes step) {
  const bool is_measured = is_measuring();
  std::lock_guard lock(mutex_);
  step.number = ++count_;
  step.forward_begin = std::exchange(forward_begin_, {});
  step.forward_end = std::exchange(forward_end_, {});
  if (!is_measured) return;
  if (steps_.size() == kKept) steps_.pop_front();
  steps_.push_back(std::move(step));
}

int64_t StepRecorder::count() const {
  std::lock_guard lock(mutex_);
  return count_;
}

std::vector<StepTimes> StepRecorder::steps() const {
  std::lock_guard lock(mutex_);
  take_event_times();
  return {steps_.begin(), steps_.end()};
}

// Relates the device's times to the host's clock, so that the ranks of a host line up in a trace: the host waits for an
// event and reads its own clock.
void StepRecorder::take_event_times() const {
  if (!device_.is_cuda() || steps_.empty() || !steps_.back().backward_end.event) return;
  detail::synchronize(*steps_.back().backward_end.event);
  const auto reference = record_event(device_);
  detail::synchronize(*reference);
  const auto host = Clock::now();
  for (auto& step : steps_)
    for (auto* moment : moments_of(step)) {
      if (!moment->event) continue;
      const std::chrono::duration<double, std::milli> age(detail::elapsed_ms(*moment->event, *reference));
      *moment = {host - std::chrono::duration_cast<Clock::duration>(age)};
    }
}

namespace {

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
    spans.push_back({std::max(bucket.started.at, from), std::min(bucket.reduced.at, to)});
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
  auto between = [](const Moment& from, const Moment& to) { return in_milliseconds(to.at - from.at); };
  auto since_begin = [&](const Moment& moment) { return between(step.backward_begin, moment); };
  data.measured_step = step.number;
  data.forward_ms = between(step.forward_begin, step.forward_end);
  data.backward_ms = since_begin(step.backward_end);
  data.exposed_ms = between(step.computed, step.backward_end);
  data.reduction_ms = under_way_ms(step, step.backward_begin.at, step.backward_end.at);
  const double hidden = under_way_ms(step, step.backward_begin.at, step.computed.at);
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
  if (measured_step == 0) return result;
  result += print(
      "step %lld: forward %.3f ms, backward %.3f ms (%.3f ms of it waiting), reductions %.3f ms (%.0f %% overlapped "
      "with computation)\n",
      static_cast<long long>(measured_step), forward_ms, backward_ms, exposed_ms, reduction_ms, overlap * 100);
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
  auto add = [&](const std::string& name, int track, const Moment& begin, const Moment& end) {
    events.push_back(event(name, rank, track, begin.at, end.at));
  };
  for (const auto& step : steps) {
    if (step.forward_end.at > step.forward_begin.at)
      add(text("forward ", step.number), kCompute, step.forward_begin, step.forward_end);
    add(text("backward ", step.number), kCompute, step.backward_begin, step.backward_end);
    add("wait", kCompute, step.computed, step.backward_end);
    auto free = step.backward_begin;  // buckets are reduced one after another
    for (size_t i = 0; i < step.buckets.size(); ++i) {
      const auto& bucket = step.buckets[i];
      const auto& begin = bucket.started.at > free.at ? bucket.started : free;
      add(text("bucket ", i, ", ", size_text(bucket.bytes)), kBuckets, begin, bucket.reduced);
      if (bucket.reduced.at > free.at) free = bucket.reduced;
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
