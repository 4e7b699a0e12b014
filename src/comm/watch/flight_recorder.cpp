#include "comm/watch/flight_recorder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iomanip>
#include <memory>
#include <random>
#include <string_view>
#include <tuple>
#include <vector>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/private_files.h"
#include "base/text.h"
#include "rendezvous/process_id.h"

namespace lockstep::detail {
namespace {

/// Enough for one failure of the largest job on a host: 1024 ranks.
constexpr size_t kMaxFiles = 1024;
/// Maximum number of kept files that are older than kRecent.
constexpr size_t kMaxOldFiles = 64;
constexpr time_t kRecent = 3600;  // seconds
constexpr std::string_view kBeginning = "lockstep-flight-";
constexpr std::string_view kEnding = ".jsonl";

struct FlightFolder {
  std::string path;
  FileDescriptor opened;
  bool is_private = false;
};

FlightFolder open_flight_folder() {
  if (const char* named = std::getenv("LOCKSTEP_FLIGHT_DIR"); named && *named) {
    FileDescriptor opened(::open(named, O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (!opened.is_open()) throw SystemError(text("open ", named, ": ", std::strerror(errno)));
    return {named, std::move(opened)};
  }
  const char* temporary = std::getenv("TMPDIR");
  const auto path = text(temporary && *temporary ? temporary : "/tmp", "/lockstep-flight-", ::geteuid());
  return {path, open_private_folder(path, "set LOCKSTEP_FLIGHT_DIR to a folder of your own"), true};
}

struct FlightFile {
  std::string name;
  FileDescriptor opened;
};

/// O_EXCL never opens an existing file, whether another user created it or an earlier process with the same pid. If the
/// name exists, the file gets an unpredictable name.
FlightFile create_flight_file(const FlightFolder& folder, int rank) {
  auto process = text(::getpid());
  for (;;) {
    auto name = text(kBeginning, process, "-rank", rank, kEnding);
    FileDescriptor opened(::openat(folder.opened.get(), name.c_str(),
                                   O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600));
    if (opened.is_open()) return {std::move(name), std::move(opened)};
    if (errno != EEXIST) throw SystemError(text("create ", folder.path, "/", name, ": ", std::strerror(errno)));
    process = text(::getpid(), "-", std::hex, std::random_device()());
  }
}

bool write_whole(const FileDescriptor& file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(file.get(), bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}

/// Safe when several ranks run it at once: they choose the same files.
void remove_oldest(const FlightFolder& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(
      ::fdopendir(::openat(folder.opened.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)), &::closedir);
  if (!listing) return;
  std::vector<std::tuple<time_t, long, std::string>> files;  // by time of change
  while (const auto* entry = ::readdir(listing.get())) {
    const std::string_view name = entry->d_name;
    struct stat status {};
    if (!name.starts_with(kBeginning) || !name.ends_with(kEnding) ||
        ::fstatat(folder.opened.get(), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode))
      continue;
    files.emplace_back(status.st_mtim.tv_sec, status.st_mtim.tv_nsec, name);
  }
  std::sort(files.begin(), files.end());
  const auto now = std::time(nullptr);
  for (size_t i = 0; i < files.size(); ++i) {
    const size_t newer = files.size() - i - 1;
    const auto& [seconds, nanoseconds, name] = files[i];
    if (newer >= kMaxFiles || (newer >= kMaxOldFiles && now - seconds > kRecent))
      ::unlinkat(folder.opened.get(), name.c_str(), 0);
  }
}

}  // namespace

std::string write_flight_file(int rank, const std::string& content) {
  const auto folder = open_flight_folder();
  const auto file = create_flight_file(folder, rank);
  auto path = text(folder.path, "/", file.name);
  if (!write_whole(file.opened, content)) {
    const int error = errno;
    ::unlinkat(folder.opened.get(), file.name.c_str(), 0);
    throw SystemError(text("write ", path, ": ", std::strerror(error)));
  }
  if (folder.is_private) remove_oldest(folder);
  return path;
}

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

}  // namespace

std::string to_json(const CallRecord& record, Clock::time_point now) {
  return text("{\"ticket\": ", record.ticket, ", \"group\": ", quoted(record.group),
              ", \"call\": ", quoted(describe(record.call_id)),
              ", \"operation\": ", quoted(name_of(record.call.operation)),
              ", \"what\": ", quoted(describe(record.call)), ", \"state\": \"", name_of(record.state),
              "\", \"site\": ", quoted(describe(record.site)), ", \"started_s_ago\": ", seconds(now - record.started),
              ", \"took_s\": ", is_over(record) ? text(seconds(record.ended - record.started)) : "null", "}");
}

std::string describe(const CallRecord& record) {
  return text(describe(record.call), ", ", describe(record.call_id), " of group '", record.group, "' at ",
              describe(record.site));
}

// The path of this file gives the folder of lockstep's sources on the machine that built lockstep; it means nothing to
// a user.
std::string describe(const CallSite& site) {
  constexpr std::string_view kHere = __FILE__, kInSources = "comm/watch/flight_recorder.cpp";
  constexpr auto kSources = kHere.substr(0, kHere.size() - kInSources.size());
  std::string_view file = site.file;
  if (site.line == 0) return std::string(file);
  if (!file.starts_with(kSources)) return text(file, ':', site.line);
  return text(file.substr(kSources.size()), ':', site.line, ", inside lockstep");
}

uint64_t FlightRecorder::begin(const CallRecord& record) {
  uint64_t ticket = ++tickets_;
  if (ring_.size() < kCalls) ring_.emplace_back();
  auto& place = ring_[(ticket - 1) % kCalls];
  if (place.ticket != 0 && !is_over(place)) evicted_.emplace(place.ticket, std::move(place));
  place = record;
  place.ticket = ticket;
  return ticket;
}

void FlightRecorder::change(uint64_t ticket, CallRecord::State state) {
  auto& place = ring_[(ticket - 1) % kCalls];
  const bool is_in_ring = place.ticket == ticket;
  const auto old = is_in_ring ? evicted_.end() : evicted_.find(ticket);
  if (!is_in_ring && old == evicted_.end()) return;  // the record was overwritten
  auto& record = is_in_ring ? place : old->second;
  record.state = state;
  if (!is_over(record)) return;
  record.ended = Clock::now();
  if (!is_in_ring) evicted_.erase(old);
}

std::optional<CallRecord> FlightRecorder::find(const std::string& group, const std::string& call_id) const {
  for (auto& record : records())
    if (record.group == group && describe(record.call_id) == call_id) return std::move(record);
  return std::nullopt;
}

std::vector<CallRecord> FlightRecorder::records() const {
  std::lock_guard lock(mutex_);
  std::vector<CallRecord> result;
  for (const auto& [ticket, record] : evicted_) result.push_back(record);
  for (uint64_t ticket = tickets_ - ring_.size() + 1; ticket <= tickets_; ++ticket)
    result.push_back(ring_[(ticket - 1) % kCalls]);
  return result;
}

std::optional<CallRecord> FlightRecorder::running(Which which) const {
  std::lock_guard lock(mutex_);
  const CallRecord* found = nullptr;
  const auto visit = [&](const CallRecord& record) {
    if (record.state != CallRecord::State::kRunning) return;
    if (!found || (record.ticket > found->ticket) == (which == Which::kNewest)) found = &record;
  };
  for (const auto& [ticket, record] : evicted_) visit(record);
  for (const auto& record : ring_) visit(record);
  return found ? std::optional(*found) : std::nullopt;
}

std::string FlightRecorder::file() const {
  std::lock_guard lock(mutex_);
  return file_;
}

void FlightRecorder::set_file(std::string path) {
  std::lock_guard lock(mutex_);
  file_ = std::move(path);
}

std::string FlightRecorder::doing() const {
  auto now = Clock::now();
  std::lock_guard lock(mutex_);
  const CallRecord* running = nullptr;
  const CallRecord* last = nullptr;
  for (const auto& [ticket, record] : evicted_)
    if (record.state == CallRecord::State::kRunning) running = &record;
  for (const auto& record : ring_) {
    if (record.state == CallRecord::State::kRunning && (!running || record.ticket > running->ticket)) running = &record;
    if (is_over(record) && (!last || record.ended > last->ended)) last = &record;
  }
  if (running) return text("in ", describe(*running), " for ", seconds(now - running->started), " s");
  if (last)
    return text("outside of any call for ", seconds(now - last->ended), " s; its last call was ", describe(*last));
  return "outside of any call; it has made no call yet";
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
