#include "launch/attempt.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "launch/process_tree.h"
#include "rendezvous/process_id.h"

// Overview: one start of all workers of this node, until all of them have ended.
//
// run() is an event loop on one thread. The supervisor (worker_processes.h) starts the workers and reports their ends.
// watch() handles their output, signals, orders of the other nodes, and timers. An attempt ends in one of these ways:
//
// - All workers end with 0.
// - A worker fails: on_end() reports it to the cluster, so the store sends the cause to all ranks. Ranks that have
//   joined get kNoticeTime to throw their own error; then all workers get SIGTERM, and after the grace period SIGKILL
//   (stop_after_failure, ask_to_end, kill_rest). A failure on another node has the same effect, through an order.
// - A signal arrives: it is forwarded to the workers, whose grace period begins; SIGUSR1 leaves them time to finish.
// - A worker ends with the exit code of a preemption: all ranks have agreed to stop, and get the grace period.
//
// The Outcome lists all ends in their order. The cluster combines the outcomes of all nodes into one verdict: success,
// failure or restart.

namespace lockstep {
namespace {

// Time between the notice of a failure and SIGTERM, in which ranks can catch their error, write their flight recorder
// and exit on their own.
constexpr auto kNoticeTime = std::chrono::seconds(2);

std::string prefix_of(const std::string& role, int rank) {
  return role.empty() ? text("[", rank, "] ") : text("[", role, " ", rank, "] ");
}

double seconds_since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

}  // namespace

Attempt::Attempt(const Options& options, Cluster* cluster, Signals* signals, Console* console, LiveFiles* live)
    : options_(options), cluster_(cluster), signals_(signals), console_(console), live_(live) {}

Verdict Attempt::run() {
  memory_kills_ = machine_.out_of_memory_kills().value_or(0);
  processes_ = std::make_unique<WorkerProcesses>(options_.secret);
  silence_.emplace(Clock::now());
  live_->begin(options_.layout);
  start_some();
  while (!has_ended()) watch();
  update_live_files();  // reads the note, which end_all() removes
  processes_->end_all();
  finish_output();
  update_live_files();
  cluster_->report_outcome(outcome_);
  while (!cluster_->verdict()) watch();
  return *cluster_->verdict();
}

std::string Attempt::log_folder(int worker) const {
  if (options_.launch.log_dir.empty()) return "";
  return text(options_.launch.log_dir, "/", options_.layout.generation, "/", options_.layout.first_rank + worker);
}

// Starts workers until the channel to the supervisor is full; watch() runs between the calls.
void Attempt::start_some() {
  while (workers_.size() < static_cast<size_t>(options_.plan.workers) && processes_->is_ready()) start_next();
}

void Attempt::start_next() {
  const int index = static_cast<int>(workers_.size());
  const auto& routes = options_.plan.routes[static_cast<size_t>(index)];
  const int rank = options_.layout.first_rank + index;
  const auto prefix = prefix_of(options_.launch.role, rank);
  auto spec = worker_spec(options_.launch, options_.plan, options_.layout, index, options_.secret_file);
  // The file of a worker's output gets lines, not every state of a progress bar.
  if (console_->is_terminal(Console::Stream::kOut) && routes.out.to_console && !routes.out.to_file)
    spec.environment.push_back(text("LOCKSTEP_TERMINAL=", columns_after(prefix)));
  auto [out, err] = processes_->start(index, spec);
  auto& worker = workers_.emplace_back();
  worker.started = Clock::now();
  const auto folder = log_folder(index);
  worker.out = std::make_unique<StreamOutput>(std::move(out),
                                              StreamOutput::Options{Console::Stream::kOut, routes.out, prefix, rank,
                                                                    folder + "/stdout", nullptr, &live_->output(rank)},
                                              console_);
  worker.err =
      std::make_unique<StreamOutput>(std::move(err),
                                     StreamOutput::Options{Console::Stream::kErr, routes.err, prefix, rank,
                                                           folder + "/stderr", &worker.memory, &live_->output(rank)},
                                     console_);
}

int Attempt::columns_after(const std::string& prefix) const {
  return std::max(1, console_->columns(Console::Stream::kOut) - static_cast<int>(prefix.size()));
}

// Records an end for all workers that are not started yet, because the job is stopping.
void Attempt::skip_rest() {
  for (int index = static_cast<int>(workers_.size()); index < options_.plan.workers; ++index) {
    workers_.emplace_back().started = Clock::now();
    on_end(index, {.status = SIGKILL, .description = "not started: the job was already stopping", .was_stopped = true});
  }
}

int Attempt::time_left() const {
  int least = -1;
  const auto live_at = std::optional(live_->due());
  const auto mention_at = silence_ && !is_stopping_ ? std::optional(silence_->due()) : std::nullopt;
  const auto times = has_ended() ? std::vector{live_at} : std::vector{live_at, ask_at_, kill_at_, mention_at};
  for (const auto& time : times) {
    if (!time) continue;
    auto left = std::chrono::ceil<std::chrono::milliseconds>(*time - Clock::now()).count();
    const int wait = static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
    least = least < 0 ? wait : std::min(least, wait);
  }
  return least;
}

bool Attempt::is_due(const std::optional<Clock::time_point>& time) const {
  return time && !has_ended() && Clock::now() >= *time;
}

// One iteration of the event loop, while workers run on this node or on other nodes.
void Attempt::watch() {
  std::vector<pollfd> files{{signals_->fd(), POLLIN, 0},
                            {has_ended() ? -1 : processes_->fd(), processes_->events(), 0},
                            {cluster_->fd(), POLLIN, 0},
                            {console_->waits_for(), POLLOUT, 0}};
  const size_t fixed = files.size();
  const size_t polled = workers_.size();
  for (const auto& worker : workers_)
    for (const auto* stream : {worker.out.get(), worker.err.get()})
      files.push_back({console_->is_full() || !stream ? -1 : stream->fd(), POLLIN, 0});
  ::poll(files.data(), files.size(), time_left());

  for (size_t i = 0; i < polled; ++i) {  // first, so that the last output of a worker precedes its end
    if (files[fixed + 2 * i].revents != 0 && workers_[i].out->read_some()) silence_.reset();
    if (files[fixed + 2 * i + 1].revents != 0 && workers_[i].err->read_some()) silence_.reset();
  }
  if (files[3].revents != 0) console_->write_some();
  while (auto number = signals_->next()) on_signal(*number);
  if (files[2].revents != 0)
    while (auto order = cluster_->next_order()) *order == 0 ? stop_after_failure() : stop(*order);
  if ((files[1].revents & ~POLLOUT) != 0 && !has_ended())
    for (const auto& event : processes_->read_events()) on_event(event);
  if ((files[1].revents & POLLOUT) != 0 && !has_ended()) processes_->flush();
  start_some();
  mention_missing_ranks();
  if (has_ended_worker_ || Clock::now() >= live_->due()) update_live_files();
  if (is_due(ask_at_)) ask_to_end(SIGTERM);
  if (is_due(kill_at_))
    kill_rest(text("killed: it did not exit within the grace period of ",
                   std::chrono::duration<double>(options_.launch.grace).count(), " s"));
}

void Attempt::on_event(const WorkerProcesses::Event& event) {
  using Kind = WorkerProcesses::Event::Kind;
  if (has_ended()) return;
  if (event.kind == Kind::kSupervisorGone) {
    if (outcome_.broken.empty())
      outcome_.broken = text(
          "the supervisor of the workers (pid ", processes_->supervisor(), ") ",
          event.why.empty() ? "was killed: all workers were killed" : text("failed, so no worker runs: ", event.why));
    return kill_rest("killed: its supervisor had ended");
  }
  auto& worker = workers_.at(static_cast<size_t>(event.worker));
  if (event.kind == Kind::kStarted) {
    worker.pid = event.value;
    worker.started = Clock::now();
    return;
  }
  if (event.kind == Kind::kRefused) return on_end(event.worker, {127 << 8, std::strerror(event.value)});
  bool out_of_memory = false;
  if (WIFSIGNALED(event.value) && WTERMSIG(event.value) == SIGKILL) {
    const int64_t kills = machine_.out_of_memory_kills().value_or(0);
    out_of_memory = kills > memory_kills_;
    memory_kills_ = std::min(kills, memory_kills_ + 1);
  }
  on_end(event.worker, {event.value, describe_status(event.value, out_of_memory), event.was_stopped, out_of_memory});
}

void Attempt::on_end(int index, const Ending& ending) {
  auto& worker = workers_.at(static_cast<size_t>(index));
  if (worker.has_ended) return;
  worker.has_ended = true;
  WorkerEnd end;
  end.rank = options_.layout.first_rank + index;
  end.host = this_process().host;
  end.pid = worker.pid;
  end.status = ending.status;
  end.description = ending.description;
  end.logs = log_folder(index);
  end.seconds = seconds_since(worker.started);
  end.after_stop = is_stopping_;
  end.was_stopped = ending.was_stopped;
  end.out_of_memory = ending.out_of_memory;
  outcome_.ends.push_back(end);
  has_ended_worker_ = true;
  if (!end.failed() || is_stopping_) return;
  if (was_preempted(end)) {  // all ranks have agreed to stop: let the other workers end as well
    if (!ask_at_ && !kill_at_) ask_at_ = Clock::now() + options_.launch.grace;
    return;
  }
  auto subject = end.pid == 0 ? text("rank ", end.rank, " on ", end.host)
                              : text("rank ", end.rank, " (pid ", end.pid, " on ", end.host, ")");
  cluster_->report_failure(
      {ErrorKind::kPeer, text(subject, " has failed: ", end.description), Culprit{end.rank, CulpritRole::kExited}});
  stop_after_failure();
}

void Attempt::on_signal(int number) {
  if (number == SIGTSTP) {  // Ctrl-Z stops the job, fg resumes it
    processes_->signal_all(SIGSTOP);
    ::raise(SIGSTOP);
    return processes_->signal_all(SIGCONT);
  }
  if (number == SIGINT && outcome_.signal) {
    if (!has_ended()) print_status("killing the workers");
    return kill_rest("killed: Ctrl-C was pressed twice");
  }
  cluster_->forward_signal(number);
  if (number == SIGINT && !has_ended()) print_status("stopping; press Ctrl-C again to kill the workers");
  stop(number);
}

// Handles a signal that this launcher, or the launcher of another node, received.
void Attempt::stop(int number) {
  if (!outcome_.signal) outcome_.signal = number;
  is_stopping_ = true;
  // Schedulers send SIGUSR1 long before they end the job: workers finish their work and exit on their own. Workers
  // cannot do that if not all of them were started.
  const bool all_started = workers_.size() == static_cast<size_t>(options_.plan.workers);
  if (number == SIGUSR1 && all_started) return processes_->signal_all(number);
  ask_to_end(number == SIGHUP ? SIGTERM : number);
}

// Ranks that have joined are notified of the failure at this point, and get kNoticeTime to report their own error.
void Attempt::stop_after_failure() {
  is_stopping_ = true;
  skip_rest();
  if (kill_at_) return;
  if (!cluster_->has_joined_ranks()) return ask_to_end(SIGTERM);
  const auto soon = Clock::now() + kNoticeTime;
  if (!ask_at_ || soon < *ask_at_) ask_at_ = soon;
}

void Attempt::ask_to_end(int signal) {
  ask_at_.reset();
  processes_->signal_all(signal);
  if (!kill_at_) kill_at_ = Clock::now() + options_.launch.grace;
  skip_rest();
}

void Attempt::kill_rest(const std::string& why) {
  processes_->end_all();
  is_stopping_ = true;
  skip_rest();
  for (size_t index = 0; index < workers_.size(); ++index)
    on_end(static_cast<int>(index), {.status = SIGKILL, .description = why, .was_stopped = true});
}

// Without any output, a job looks as if it hangs. After all ranks have joined, the ranks report waits themselves. A
// single rank waits for no other rank.
void Attempt::mention_missing_ranks() {
  constexpr size_t kMost = 8;
  if (options_.layout.world_size == 1) return;
  if (is_stopping_ || !silence_ || !silence_->is_due(Clock::now())) return;
  const auto missing = cluster_->missing_ranks();
  if (!missing || missing->empty()) return silence_.reset();
  std::vector<std::string> described;
  for (const auto& [rank, where] : *missing) {
    if (described.size() == kMost) break;
    const auto index = static_cast<size_t>(rank - options_.layout.first_rank);
    const bool is_local = rank >= options_.layout.first_rank && index < workers_.size();
    if (!is_local)
      described.push_back(text("rank ", rank, where.empty() ? " (not started yet)" : text(" (", where, ")")));
    else if (workers_[index].pid == 0)
      described.push_back(text("rank ", rank, " (not started yet)"));
    else
      described.push_back(text("rank ", rank, " (pid ", workers_[index].pid, " on ", this_process().host, ": ",
                               workers_[index].has_ended ? "ended" : describe_process(workers_[index].pid), ")"));
  }
  if (missing->size() > kMost) described.push_back(text(missing->size() - kMost, " more"));
  print_status(text("no output since the start ", silence_->seconds(Clock::now()), " s ago; ", missing->size(), " of ",
                    options_.layout.world_size, missing->size() == 1 ? " ranks has" : " ranks have",
                    " not joined the job (init_process_group): ", enumerate(described)));
}

void Attempt::finish_output() {
  for (auto& worker : workers_)
    for (auto* stream : {worker.out.get(), worker.err.get()})
      if (stream) stream->finish();
  for (auto& end : outcome_.ends) {
    const auto& memory = workers_.at(static_cast<size_t>(end.rank - options_.layout.first_rank)).memory;
    end.uncaught = memory.uncaught();
    end.tail.assign(memory.tail().begin(), memory.tail().end());
  }
}

void Attempt::update_live_files() {
  has_ended_worker_ = false;
  std::vector<LiveFiles::Worker> workers;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const int local_rank = static_cast<int>(i);
    workers.push_back({.rank = options_.layout.first_rank + local_rank,
                       .local_rank = local_rank,
                       .pid = workers_[i].pid,
                       .seconds = seconds_since(workers_[i].started),
                       .uncaught = workers_[i].memory.uncaught()});
  }
  for (const auto& end : outcome_.ends) {
    auto& worker = workers.at(static_cast<size_t>(end.rank - options_.layout.first_rank));
    worker.has_ended = true;
    worker.has_failed = end.failed() && !was_preempted(end);
    worker.description = end.description;
    worker.seconds = end.seconds;
  }
  live_->update(processes_->note_file(), std::move(workers));
}

void Attempt::print_status(const std::string& line) {
  console_->put(Console::Stream::kErr, text("lockstep run: ", line, "\n"));
}

}  // namespace lockstep
