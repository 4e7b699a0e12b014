#include "launch/report.h"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <iomanip>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/exit_status.h"
#include "base/text.h"

namespace lockstep {
namespace {

std::string explain_exit_code(int exit_code) {
  if (exit_code == 126) return " (the program could not be executed)";
  if (exit_code == 127) return " (from a shell: command not found; from the loader: library not found)";
  const int signal = exit_code - 128;
  const char* name = signal > 0 && signal < 32 ? ::sigabbrev_np(signal) : nullptr;
  return name ? text(" (from a shell: its command was killed by SIG", name, ")") : "";
}

std::string in_seconds(double number) {
  return text(std::fixed, std::setprecision(1), number, " s");
}

std::string describe_others(const std::vector<WorkerEnd>& ends) {
  std::vector<std::string> parts;
  for (const auto& end : ends) parts.push_back(text(end.rank, " (", end.description, ")"));
  return text(parts.size() == 1 ? "rank " : "ranks ", enumerate(parts));
}

/// "rank 2", "ranks 1-3 and 7".
std::string name_ranks(const std::vector<WorkerEnd>& ends) {
  std::vector<int> ranks;
  for (const auto& end : ends) ranks.push_back(end.rank);
  std::sort(ranks.begin(), ranks.end());
  std::vector<std::string> parts;
  for (size_t first = 0, next = 0; first < ranks.size(); first = next) {
    for (next = first + 1; next < ranks.size() && ranks[next] == ranks[next - 1] + 1;) ++next;
    parts.push_back(next - first == 1 ? text(ranks[first]) : text(ranks[first], "-", ranks[next - 1]));
  }
  return text(ranks.size() == 1 ? "rank " : "ranks ", enumerate(parts));
}

/// The text of an uncaught exception ("type: text") without the rank that it names.
std::string without_rank_in(const WorkerEnd& end) {
  const auto colon = end.uncaught.find(": ");
  if (colon == end.uncaught.npos) return end.uncaught;
  return end.uncaught.substr(0, colon + 2) + without_rank(end.uncaught.substr(colon + 2), end.rank);
}

/// Whether both ended with an exception of the same type and text, apart from their own rank.
bool have_same_error(const WorkerEnd& a, const WorkerEnd& b) {
  return !a.uncaught.empty() && without_rank_in(a) == without_rank_in(b);
}

nlohmann::ordered_json to_json(const WorkerEnd& end) {
  nlohmann::ordered_json json{{"rank", end.rank}, {"host", end.host}, {"pid", end.pid}, {"how", end.description}};
  if (WIFSIGNALED(end.status))
    json["signal"] = WTERMSIG(end.status);
  else
    json["exit_code"] = WEXITSTATUS(end.status);
  json["uncaught"] = end.uncaught;
  json["stderr_tail"] = end.tail;
  json["logs"] = end.logs;
  json["seconds"] = end.seconds;
  return json;
}

nlohmann::ordered_json to_json(const std::vector<WorkerEnd>& ends) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& end : ends) json.push_back(to_json(end));
  return json;
}

/// Replaces invalid UTF-8, because the output of workers may contain any bytes.
std::string dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

/// Whether the message contains the text of the uncaught exception ("type: text").
bool repeats(const std::string& uncaught, const std::string& message) {
  const auto colon = uncaught.find(": ");
  return colon != uncaught.npos && message.find(uncaught.substr(colon + 2)) != message.npos;
}

/// Leaves out the lines that libstdc++ and libc++ print about the uncaught exception: the report has them already.
std::vector<std::string> without_exception(std::vector<std::string> tail, const std::string& uncaught) {
  if (uncaught.empty()) return tail;
  std::erase_if(tail, [](const std::string& line) {
    return line.starts_with("terminate called after throwing an instance of '") || line.starts_with("  what():  ") ||
           line.starts_with("libc++abi: terminating");
  });
  return tail;
}

bool has_role(const std::optional<Failure>& notice, CulpritRole role) {
  return notice && notice->culprit && notice->culprit->role == role;
}

/// Returns the remedy for the last line.
std::string remedy_for(const LaunchReport& report) {
  const auto& culprit = *report.culprit;
  const std::string output = !culprit.uncaught.empty() ? "the exception above"
                             : culprit.tail.empty()    ? "its output"
                                                       : "its stderr above";
  if (culprit.pid == 0) return "check the program's path, and the limits of processes and memory";
  const auto& notice = report.notice;
  const auto kind = notice ? notice->kind : ErrorKind::kPeer;
  const bool has_left = has_role(notice, CulpritRole::kLeft);
  if (has_role(notice, CulpritRole::kSilent))
    return "find out what stopped its process (kill -STOP, Ctrl-Z, a suspended machine, memory that is swapped out) or "
           "cut off its host or network; if such pauses are normal, raise LOCKSTEP_HEARTBEAT_LIMIT";
  if (kind == ErrorKind::kTimeout)
    return "it did not reach a call in time: find out what it did instead, or raise the time-out if it is only slow";
  if (kind == ErrorKind::kMismatch) return "make the same calls in the same order on all ranks";
  if (culprit.was_stopped) return text("it gave up or hung: see the message that the ranks received, and ", output);
  if (culprit.out_of_memory) return "use less memory on this host, or raise the limit";
  if (WIFSIGNALED(culprit.status) && WTERMSIG(culprit.status) == SIGKILL)
    return "find out who sent the signal: a person, the scheduler, or the kernel because memory ran out (dmesg)";
  if (WIFSIGNALED(culprit.status))
    return text(
        "see ", output, WCOREDUMP(culprit.status) ? text(" and its core dump (coredumpctl gdb ", culprit.pid, ")") : "",
        "; to see where, run the ranks in gdb: lockstep run [the same options] gdb -batch -ex run -ex bt --args ",
        report.command.empty() ? "PROGRAM" : in_shell(report.command));
  if (has_left || !culprit.failed())
    return "make the same calls on all ranks and exit together; for uneven inputs use join";
  return text("see ", output);
}

}  // namespace

std::string in_shell(const std::vector<std::string>& command) {
  std::string result;
  for (const auto& argument : command) {
    const bool is_plain = !argument.empty() && argument.find_first_of(" \t\n'\"\\$`*?[]{}()<>|&;#~!") == argument.npos;
    std::string quoted = "'";
    for (char letter : argument) quoted += letter == '\'' ? "'\\''" : std::string(1, letter);
    result += (result.empty() ? "" : " ") + (is_plain ? argument : quoted + "'");
  }
  return result;
}

bool was_preempted(const WorkerEnd& end) {
  return end.pid != 0 && WIFEXITED(end.status) && WEXITSTATUS(end.status) == static_cast<int>(LaunchExit::kPreempted);
}

std::string describe_status(int status, bool out_of_memory) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && out_of_memory)
    return "killed: out of memory (by the kernel; check the memory limit)";
  return describe_exit_status(status) + (WIFEXITED(status) ? explain_exit_code(WEXITSTATUS(status)) : "");
}

LaunchReport make_report(const std::vector<WorkerEnd>& ends, const std::optional<Failure>& notice) {
  LaunchReport report;
  report.notice = notice;
  const auto named = notice ? notice->culprit : std::nullopt;
  const bool any_failed = std::any_of(ends.begin(), ends.end(), std::mem_fn(&WorkerEnd::failed));
  if (!any_failed) return report;
  auto blame_order = [&](const WorkerEnd& end) {
    if (named && end.rank == named->rank) return 0;
    return !end.failed() ? 3 : end.after_stop ? 2 : 1;
  };
  auto culprit = std::min_element(ends.begin(), ends.end(), [&](const WorkerEnd& a, const WorkerEnd& b) {
    return blame_order(a) < blame_order(b);
  });
  report.culprit = *culprit;
  // A silent rank ends after the other ranks have given up, when it resumes or its network is back: its end is not the
  // cause.
  const bool is_silent = named && named->role == CulpritRole::kSilent && named->rank == culprit->rank;
  if (is_silent)
    report.culprit->description = text("stopped answering (ended later: ", culprit->description, ")");
  else if (culprit->was_stopped)  // the rank gave up, and the launcher stopped it before it exited on its own
    report.culprit->description = text("stopped with the others (", culprit->description, ")");
  else if (!culprit->failed())
    report.culprit->description += ", while other ranks still needed it";
  const bool was_killed = WIFSIGNALED(culprit->status) && !culprit->was_stopped && !is_silent;
  report.exit = was_killed ? LaunchExit::kWorkerKilled : LaunchExit::kWorkerFailed;
  for (auto end = ends.begin(); end != ends.end(); ++end) {
    if (end != culprit && end->failed())
      (!is_silent && have_same_error(*culprit, *end) ? report.same_error : report.consequences).push_back(*end);
    if (end != culprit && !end->failed() && !end->after_stop) report.ended_before.push_back(*end);
  }
  return report;
}

Verdict decide(const Outcome& outcome, const std::optional<Failure>& cause, int generation, int max_restarts) {
  Verdict verdict;
  auto& report = verdict.report;
  report.restarts = generation;
  if (!outcome.broken.empty()) {
    report.exit = LaunchExit::kInternal;
    report.message = outcome.broken;
    verdict.restart = !outcome.signal && generation < max_restarts;
    return verdict;
  }
  if (outcome.signal) {
    report.exit = LaunchExit::kPreempted;
    report.message = text("stopped by SIG", ::sigabbrev_np(*outcome.signal));
    return verdict;
  }
  report = make_report(outcome.ends, cause);
  report.restarts = generation;
  if (report.culprit && was_preempted(*report.culprit)) {
    report.exit = LaunchExit::kPreempted;
    report.message = text("rank ", report.culprit->rank, " was preempted (", report.culprit->description, ")");
    report.culprit.reset();
    report.same_error.clear();
    report.consequences.clear();
    report.ended_before.clear();
  }
  verdict.restart = report.exit != LaunchExit::kSuccess && generation < max_restarts;
  return verdict;
}

std::string describe_report(const LaunchReport& report, bool in_colour) {
  std::string out;
  auto line = [&](const auto&... parts) { out += text("lockstep run: ", parts..., "\n"); };
  auto headline = [&](const auto&... parts) {
    out += text(in_colour ? "\033[1;31m" : "", "lockstep run: ", parts..., in_colour ? "\033[0m" : "", "\n");
  };
  if (!report.message.empty()) headline(report.message);
  if (report.culprit) {
    const auto& culprit = *report.culprit;
    if (culprit.pid == 0)
      headline("rank ", culprit.rank, " on ", culprit.host, " could not be started: ", culprit.description);
    else
      headline("rank ", culprit.rank, " (pid ", culprit.pid, " on ", culprit.host, ") failed first, after ",
               in_seconds(culprit.seconds), ": ", culprit.description);
    if (!culprit.uncaught.empty()) line("  uncaught exception: ", culprit.uncaught);
    const auto& notice = report.notice;
    const bool from_launcher = has_role(notice, CulpritRole::kExited);
    if (notice && !from_launcher && !repeats(culprit.uncaught, notice->message))
      line("  message to the ranks: ", notice->message);
    const auto tail = without_exception(culprit.tail, culprit.uncaught);
    if (!tail.empty()) line("  last lines of its stderr:");
    for (const auto& last : tail) out += text("    | ", last, "\n");
    if (!culprit.logs.empty()) line("  its output: ", culprit.logs);
  }
  if (!report.same_error.empty()) line("  ", name_ranks(report.same_error), ": the same error");
  if (!report.ended_before.empty()) line("  ended before it: ", describe_others(report.ended_before));
  if (!report.consequences.empty()) line("  failed as a consequence: ", describe_others(report.consequences));
  if (report.culprit && report.restarts > 0)
    line("  failed ", report.restarts + 1, " times, restarted ", report.restarts, " times: no restart is left");
  if (report.culprit)
    headline("rank ", report.culprit->rank, " (pid ", report.culprit->pid, " on ", report.culprit->host,
             report.same_error.empty() ? ") is" : text(") and ", name_ranks(report.same_error), " are"),
             " to blame: ", report.culprit->description, "; ", remedy_for(report));
  return out;
}

std::string report_to_json(const LaunchReport& report) {
  nlohmann::ordered_json json{{"exit_code", static_cast<int>(report.exit)},
                              {"restarts", report.restarts},
                              {"seconds", report.seconds},
                              {"message", report.message}};
  json["culprit"] = report.culprit ? to_json(*report.culprit) : nlohmann::ordered_json();
  json["notice"] = report.notice ? report.notice->message : "";
  json["remedy"] = report.culprit ? remedy_for(report) : "";
  json["same_error"] = to_json(report.same_error);
  json["consequences"] = to_json(report.consequences);
  json["ended_before"] = to_json(report.ended_before);
  return dump(json) + "\n";
}

std::string pack_ends(const std::vector<WorkerEnd>& ends) {
  auto json = to_json(ends);
  for (size_t i = 0; i < ends.size(); ++i) {
    json[i]["status"] = ends[i].status;
    json[i]["after_stop"] = ends[i].after_stop;
    json[i]["was_stopped"] = ends[i].was_stopped;
    json[i]["out_of_memory"] = ends[i].out_of_memory;
  }
  return dump(json);
}

std::vector<WorkerEnd> unpack_ends(const std::string& packed) {
  std::vector<WorkerEnd> ends;
  for (const auto& json : nlohmann::json::parse(packed))
    ends.push_back({json.at("rank"), json.at("host"), json.at("pid"), json.at("status"), json.at("how"),
                    json.at("uncaught"), json.at("stderr_tail"), json.at("logs"), json.at("seconds"),
                    json.at("after_stop"), json.at("was_stopped"), json.at("out_of_memory")});
  return ends;
}

}  // namespace lockstep
