#include "comm/watch/job.h"

#include <lockstep/error.h>

#include "base/log.h"
#include "base/text.h"
#include "base/variables.h"
#include "rendezvous/rendezvous.h"

namespace lockstep::detail {
namespace {

constexpr auto kLinger = std::chrono::seconds(1);
constexpr const char* kException = "an exception ended its work";

std::vector<std::string> report_fields(const std::string& wire_group, const char* certainty, const Failure& failure) {
  std::vector<std::string> fields{wire_group, certainty};
  for (auto& field : to_fields(failure)) fields.push_back(std::move(field));
  return fields;
}

}  // namespace

// Group names contain '/', so that the keys of group 'a' would include those of 'a/1' if they ended with '/'.
std::string group_keys(const std::string& group) {
  return text("group/", group, "|");
}

std::string base_name(const std::string& group) {
  return group.substr(0, group.find(':'));
}

JobAttempt this_attempt() {
  return {job_name(process_variable), restart_count(process_variable)};
}

Job::Job(std::vector<Peer> peers, int rank, int joins_before, std::shared_ptr<Store> store, std::string key_prefix,
         std::shared_ptr<StoreClient> client, std::unique_ptr<StoreServer> server)
    : peers_(std::move(peers)),
      rank_(rank),
      prefix_(text(joins_before, "/")),
      key_prefix_(std::move(key_prefix)),
      server_(std::move(server)),
      client_(std::move(client)),
      store_(std::move(store)) {
  if (client_) client_->listen(this);
}

Job::~Job() {
  if (!client_) return;
  client_->stop_listening();
  bool is_failing = std::uncaught_exceptions() > 0;
  if (is_failing)
    client_->leave_job(Failure{ErrorKind::kPeer, kException});
  else
    client_->leave_job(std::nullopt);
  client_.reset();
  store_.reset();
  // Other ranks may be about to leave too. Without the store they would lose failure detection, so wait for them.
  if (server_ && !is_failing && !failure_) server_->await_departures(kLinger);
}

void Job::give_up(const std::exception_ptr& error) noexcept {
  if (client_) client_->leave_job(to_failure(error));
}

// Reports at once, before the ranks that this wakes give up in turn: the first rank that gives up is blamed.
void Job::give_up_group(const std::string& group, const std::string& rank_name) noexcept {
  if (group == kWorld && client_) return client_->leave_job(Failure{ErrorKind::kPeer, kException});
  report_async(group,
               {ErrorKind::kPeer, text(rank_name, " gave up: ", kException), Culprit{rank_, CulpritRole::kGaveUp}});
}

std::optional<std::string> Job::from_wire(const std::string& group) const {
  if (!group.starts_with(prefix_)) return std::nullopt;
  return group.substr(prefix_.size());
}

void Job::subscribe(const std::string& group, JobListener& listener) {
  std::lock_guard lock(mutex_);
  listeners_.emplace(&listener, group);
  if (failure_) listener.on_failure(failure_);
  if (auto found = group_failures_.find(base_name(group)); found != group_failures_.end())
    listener.on_failure(found->second);
  for (const auto& [rank, calls] : departures_[group]) listener.on_left(rank, calls);
  std::erase_if(notes_[group], [&](const auto& note) { return listener.on_note(note.first, note.second); });
}

void Job::unsubscribe(JobListener& listener) {
  std::lock_guard lock(mutex_);
  listeners_.erase(&listener);
}

Failure Job::report(const std::string& group, const Failure& failure, Certainty certainty) {
  if (!client_) return failure;
  try {
    return read_failure(client_->call(
        Verb::kReport,
        report_fields(on_wire(group), certainty == Certainty::kSymptom ? "symptom" : "certain", failure)));
  } catch (const Error&) {
    // The store is gone. If its loss ended the job, that is the cause. If the store ended cleanly, it is not.
    return client_->over().value_or(failure);
  }
}

void Job::report_async(const std::string& group, const Failure& failure) noexcept {
  if (client_) client_->send_async(Verb::kReport, report_fields(on_wire(group), "certain", failure));
}

void Job::blame(const Failure& failure) noexcept {
  if (client_ && failure.culprit) client_->send_async(Verb::kBlame, to_fields(failure));
}

void Job::will_report(const std::string& group) {
  if (client_) client_->send_async(Verb::kWillReport, {on_wire(group)});
}

std::vector<Answer> Job::ask(const std::string& group, const std::string& call_id) {
  if (!client_) return {};
  try {
    return read_answers(client_->call(Verb::kAsk, {on_wire(group), call_id}));
  } catch (const std::exception&) {
    return {};  // no store is left to relay the question
  }
}

// An answer may arrive after the listener was destroyed.
void Job::notify(JobListener& listener, const std::function<void()>& callback) {
  std::lock_guard lock(mutex_);
  if (listeners_.contains(&listener)) callback();
}

void Job::ask(JobListener& listener, const std::string& group, const std::string& call_id) {
  if (!client_) return;
  client_->call(Verb::kAsk, {on_wire(group), call_id},
                [this, &listener, call_id](std::optional<StoreClient::Fields> fields) {
                  if (fields) notify(listener, [&] { listener.on_answers(call_id, read_answers(*fields)); });
                });
}

void Job::report(JobListener& listener, const std::string& group, const Failure& failure) {
  if (!client_) return;
  client_->call(Verb::kReport, report_fields(on_wire(group), "certain", failure),
                [this, &listener](std::optional<StoreClient::Fields> fields) {
                  if (fields) notify(listener, [&] { listener.on_failure(to_exception(read_failure(*fields))); });
                });
}

std::string Job::dump_flight(const std::string& reason) {
  std::lock_guard lock(flight_mutex_);
  if (recorder_->file().empty()) recorder_->set_file(dump(*recorder_, rank_, reason));
  return recorder_->file();
}

void Job::note(int rank_in_job, const std::string& group, const std::string& content) noexcept {
  if (client_) client_->send_async(Verb::kNote, {std::to_string(rank_in_job), on_wire(group), content});
}

void Job::leave(const std::string& group, int64_t calls, int members) noexcept {
  if (client_)
    client_->send_async(Verb::kLeave, {on_wire(group), std::to_string(calls), std::to_string(members),
                                       key_prefix_ + group_keys(group)});
}

void Job::on_failure(const std::string& wire_group, const Failure& failure) {
  const bool is_job = wire_group.empty();
  const auto group = from_wire(wire_group);
  if (!is_job && !group) return;
  std::lock_guard lock(mutex_);
  auto cause = to_exception(failure);
  if (is_job && !failure_) failure_ = cause;
  if (!is_job) group_failures_.emplace(base_name(*group), cause);  // this rank may not have created the group yet
  for (const auto& [listener, name] : listeners_)
    if (is_job || base_name(*group) == base_name(name)) listener->on_failure(cause);
}

void Job::on_left(int rank, const std::string& wire_group, int64_t calls) {
  const auto group = from_wire(wire_group);
  if (!group) return;
  std::lock_guard lock(mutex_);
  departures_[*group].emplace_back(rank, calls);
  for (const auto& [listener, name] : listeners_)
    if (*group == name) listener->on_left(rank, calls);
}

void Job::on_note(int rank, const std::string& wire_group, const std::string& content) {
  const auto group = from_wire(wire_group);
  if (!group) return;
  std::lock_guard lock(mutex_);
  bool is_taken = false;
  for (const auto& [listener, name] : listeners_)
    if (*group == name && listener->on_note(rank, content)) is_taken = true;
  if (!is_taken) notes_[*group].emplace_back(rank, content);
}

// For a group of another join this rank finds no record, but still answers what it is doing.
std::string Job::on_question(const std::string& wire_group, const std::string& call_id) {
  return answer(*recorder_, from_wire(wire_group).value_or(wire_group), call_id);
}

void Job::on_tick() {
  std::lock_guard lock(mutex_);
  for (const auto& [listener, name] : listeners_) listener->on_tick();
}

}  // namespace lockstep::detail
