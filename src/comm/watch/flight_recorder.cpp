#include "comm/watch/flight_recorder.h"

#include <algorithm>
#include <ctime>
#include <iomanip>

#include <lockstep/version.h>

#include "base/text.h"
#include "comm/watch/flight_file.h"
#include "rendezvous/process_id.h"

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration time) {
  return static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()) / 1000;
}

const char* name_of(CallRecord::State state) {
  switch (state) {
    case CallRecord::State::kPosted:
      return "posted";
    case CallRecord::State::kRunning:
      return "running";
    case CallRecord::State::kDone:
      return "done";
    case CallRecord::State::kFailed:
      return "failed";
  }
  return "";
}

bool is_over(const CallRecord& record) {
  return record.state == CallRecord::State::kDone || record.state == CallRecord::State::kFailed;
}

std::string quoted(const std::string& value) {
  std::ostringstream out;
  out << '"';
  for (unsigned char c : value) {
    if (c == '"' || c == '\\')
      out << '\\' << c;
    else if (c < 0x20)
      out << "\\u00" << std::hex << std::setw(2) << std::setfill('0') << int{c} << std::dec;
    else
      out << c;
  }
  out << '"';
  return out.str();
}

std::string to_json(const CallRecord& record, Clock::time_point now) {
  return text("{\"ticket\": ", record.ticket, ", \"group\": ", quoted(record.group),
              ", \"call\": ", quoted(describe(record.call_id)),
              ", \"operation\": ", quoted(name_of(record.call.operation)),
              ", \"what\": ", quoted(describe(record.call)), ", \"state\": \"", name_of(record.state),
              "\", \"site\": ", quoted(text(record.site.file, ':', record.site.line)),
              ", \"started_s_ago\": ", seconds(now - record.started),
              ", \"took_s\": ", is_over(record) ? text(seconds(record.ended - record.started)) : "null", "}");
}

}  // namespace

std::string describe(const CallRecord& record) {
  return text(describe(record.call), ", ", describe(record.call_id), " of group '", record.group, "' at ",
              record.site.file, ':', record.site.line);
}

uint64_t FlightRecorder::begin(const CallRecord& record) {
  uint64_t ticket = ++tickets_;
  if (ring_.size() < kCalls) ring_.emplace_back();
  auto& place = ring_[(ticket - 1) % kCalls];
  if (place.ticket != 0 && !is_over(place)) aside_.emplace(place.ticket, std::move(place));
  place = record;
  place.ticket = ticket;
  return ticket;
}

void FlightRecorder::change(uint64_t ticket, CallRecord::State state) {
  auto& place = ring_[(ticket - 1) % kCalls];
  const bool is_in_ring = place.ticket == ticket;
  const auto old = is_in_ring ? aside_.end() : aside_.find(ticket);
  if (!is_in_ring && old == aside_.end()) return;  // so many calls later, it is forgotten
  auto& record = is_in_ring ? place : old->second;
  record.state = state;
  if (!is_over(record)) return;
  record.ended = Clock::now();
  if (!is_in_ring) aside_.erase(old);
}

std::optional<CallRecord> FlightRecorder::find(const std::string& group, const std::string& call_id) const {
  for (auto& record : records())
    if (record.group == group && describe(record.call_id) == call_id) return std::move(record);
  return std::nullopt;
}

std::vector<CallRecord> FlightRecorder::records() const {
  std::lock_guard lock(mutex_);
  std::vector<CallRecord> result;
  for (const auto& [ticket, record] : aside_) result.push_back(record);
  for (uint64_t ticket = tickets_ - ring_.size() + 1; ticket <= tickets_; ++ticket)
    result.push_back(ring_[(ticket - 1) % kCalls]);
  return result;
}

std::string FlightRecorder::doing() const {
  auto now = Clock::now();
  std::lock_guard lock(mutex_);
  const CallRecord* running = nullptr;
  const CallRecord* last = nullptr;
  for (const auto& [ticket, record] : aside_)
    if (record.state == CallRecord::State::kRunning) running = &record;
  for (const auto& record : ring_) {
    if (record.state == CallRecord::State::kRunning && (!running || record.ticket > running->ticket)) running = &record;
    if (is_over(record) && (!last || record.ended > last->ended)) last = &record;
  }
  if (running) return text("in ", describe(*running), " for ", seconds(now - running->started), " s");
  if (last) return text("outside of any call for ", seconds(now - last->ended), " s; its last was ", describe(*last));
  return "outside of any call, having made none yet";
}

std::string dump(const FlightRecorder& recorder, int rank, const std::string& reason) {
  auto now = Clock::now();
  auto process = this_process();
  std::string content =
      text("{\"lockstep\": \"", LOCKSTEP_VERSION_STRING, "\", \"rank\": ", rank, ", \"host\": ", quoted(process.host),
           ", \"pid\": ", process.pid, ", \"time\": ", std::time(nullptr), ", \"reason\": ", quoted(reason), "}\n");
  for (const auto& record : recorder.records()) content += to_json(record, now) + "\n";
  try {
    return write_flight_file(rank, content);
  } catch (const std::exception& error) {
    return text("(could not be written: ", error.what(), ")");
  }
}

}  // namespace lockstep::detail
