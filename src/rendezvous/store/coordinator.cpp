#include "rendezvous/store/coordinator.h"

#include <algorithm>
#include <utility>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/text.h"

// Groups and the job fail separately. The first failure of each is kept, and all ranks are notified of it (kNotice).
//
// The job fails when a rank's liveness connection is lost, when a rank sends no heartbeat within its limit, when a rank
// leaves with a failure (kLeaveJob), or when the launcher calls end_job().
//
// A group fails when a rank reports an error (kReport). Ranks often see a symptom before the cause: when rank 2 dies,
// its neighbours first see broken connections. A report marked "symptom" is therefore held back for kDiagnosis, or up
// to kAnnounced if another report of the group was announced (kWillReport). If the group or the job fails meanwhile,
// the reporting rank receives that failure instead of its own.
//
// A rank may fail because of another rank whose connection is intact, such as a straggler. It sends kBlame first. If
// the job then fails within kConsequence, first_failure() comes from the blame.

namespace lockstep {
namespace {

const std::string& field(const StoreMessage& message, size_t index) {
  if (index >= message.fields.size()) throw ProtocolError("the request has too few fields");
  return message.fields[index];
}

std::vector<std::string> in_front(std::string first, std::vector<std::string> fields) {
  fields.insert(fields.begin(), std::move(first));
  return fields;
}

constexpr int64_t kMaxLimitMs = 1'000'000'000'000;  // 31 years; more would overflow the nanoseconds of the clock

double seconds(std::chrono::steady_clock::duration time) {
  return static_cast<double>(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()) / 1000;
}

}  // namespace

Coordinator::Coordinator(const Host& host, Members kind)
    : welcome_{Verb::kWelcome,
               0,
               {host.role, host.process.host, host.process.host_id, std::to_string(host.process.pid),
                host.rank ? std::to_string(*host.rank) : ""}},
      kind_(kind) {}

void Coordinator::send(Connection to, StoreMessage message) {
  outgoing_.push_back({to, std::move(message)});
}

void Coordinator::answer(Connection to, uint64_t id, std::vector<std::string> fields) {
  send(to, {Verb::kDone, id, std::move(fields)});
}

void Coordinator::refuse(Connection to, uint64_t id, std::string why) {
  send(to, {Verb::kRefused, id, {std::move(why)}});
}

void Coordinator::send_to_all(const StoreMessage& message, std::optional<Connection> except) {
  for (Connection connection : connections_)
    if (connection != except) send(connection, message);
}

std::vector<Coordinator::Outgoing> Coordinator::take_outgoing() {
  return std::exchange(outgoing_, {});
}

void Coordinator::connected(Connection connection) {
  connections_.insert(connection);
  send(connection, welcome_);
}

void Coordinator::heard(Connection connection, Time now) {
  auto member = members_.find(connection);
  if (member != members_.end()) member->second.heard = now;
}

void Coordinator::received(Connection connection, const StoreMessage& message, Time now) {
  heard(connection, now);
  const auto member = members_.find(connection);
  switch (message.verb) {
    case Verb::kSet:
      table_.set(field(message, 0), field(message, 1));
      answer(connection, message.id, {});
      return wake_waiters();
    case Verb::kGet:
      return get(connection, message);
    case Verb::kCancel:
      return cancel(connection, static_cast<uint64_t>(to_number(field(message, 0))));
    case Verb::kAdd:
      try {
        auto sum = std::to_string(table_.sum(field(message, 0), to_number(field(message, 1))));
        table_.set(field(message, 0), sum);
        answer(connection, message.id, {sum});
      } catch (const UsageError& error) {
        refuse(connection, message.id, error.what());
      }
      return wake_waiters();
    case Verb::kAppend:
      return append(connection, message);
    case Verb::kMultiSet:
      return multi_set(connection, message);
    case Verb::kCompareSet:
      if (table_.matches(field(message, 0), field(message, 1))) table_.set(field(message, 0), field(message, 2));
      answer(connection, message.id, {table_.find(field(message, 0)).value_or("")});
      return wake_waiters();
    case Verb::kCheck:
      return answer(connection, message.id, {table_.missing(message.fields).empty() ? "1" : "0"});
    case Verb::kErase:
      return answer(connection, message.id, {table_.erase(field(message, 0)) ? "1" : "0"});
    case Verb::kJoin:
      return join(connection, message, now);
    case Verb::kReport:
      return report(connection, message, now);
    case Verb::kAsk:
      return ask(connection, message, now);
    case Verb::kBeat:
      if (member != members_.end()) {
        if (!field(message, 0).empty()) {
          member->second.doing = field(message, 0);
          member->second.doing_since = now;
        }
        member->second.traced = field(message, 1) == "traced";
      }
      return send(connection, {Verb::kHeartbeatReply});
    case Verb::kAnswer:
      return receive_answer(connection, message);
    case Verb::kWillReport:
      announced_.insert_or_assign(field(message, 0), now + kAnnounced);
      return;
    case Verb::kLeave:
      return leave(connection, message);
    case Verb::kNote:
      if (member != members_.end()) forward_note(member->second.rank, message);
      return;
    case Verb::kBlame:
      if (member != members_.end()) blame(message, now);
      return;
    case Verb::kLeaveJob:
      return leave_job(connection, message, now);
    default:
      throw ProtocolError("the request has an unknown verb");
  }
}

void Coordinator::get(Connection connection, const StoreMessage& message) {
  if (job_failure_ && !table_.missing(message.fields).empty())
    return send(connection, {Verb::kFailed, message.id, to_fields(*job_failure_)});
  waiters_.push_back({connection, message.id, message.fields});
  wake_waiters();
}

// Remembers the position of the first missing key. When N ranks wait for N keys, each new key would otherwise make
// every waiter check all keys.
bool Coordinator::is_satisfied(Waiter& waiter) const {
  while (waiter.next < waiter.keys.size() && table_.contains(waiter.keys[waiter.next])) ++waiter.next;
  if (waiter.next < waiter.keys.size()) return false;
  waiter.next = 0;  // a key may have been erased in the meantime
  return table_.missing(waiter.keys).empty();
}

void Coordinator::wake_waiters() {
  waiters_.remove_if([&](Waiter& waiter) {
    if (!is_satisfied(waiter)) return false;
    answer_with_values(waiter);
    return true;
  });
}

// Checks the size before the values are copied: a request may name a large value a million times.
void Coordinator::answer_with_values(const Waiter& waiter) {
  const size_t bytes = table_.bytes(waiter.keys);
  if (fits_in_message(waiter.keys.size(), bytes))
    return answer(waiter.connection, waiter.id, table_.values(waiter.keys));
  refuse(waiter.connection, waiter.id,
         text("store: the values of the ", waiter.keys.size(), " requested keys have ", bytes,
              " bytes together; an answer is limited to ", Decoder::kMaxBytes >> 20,
              " MiB. Request fewer keys at once, or send large data through the process group"));
}

// Refuses a value that no answer could carry.
void Coordinator::append(Connection connection, const StoreMessage& message) {
  const auto& key = field(message, 0);
  const auto& value = field(message, 1);
  const size_t bytes = table_.bytes({key});
  if (!fits_in_message(1, bytes + value.size()))
    return refuse(connection, message.id,
                  text("store: cannot append ", value.size(), " bytes to key '", key, "', whose value has ", bytes,
                       " bytes: a value is limited to ", Decoder::kMaxBytes >> 20,
                       " MiB. Use several keys, or send large data through the process group"));
  table_.append(key, value);
  answer(connection, message.id, {});
  wake_waiters();
}

void Coordinator::multi_set(Connection connection, const StoreMessage& message) {
  if (message.fields.size() % 2 != 0) throw ProtocolError("a key has no value");
  for (size_t i = 0; i < message.fields.size(); i += 2) table_.set(message.fields[i], message.fields[i + 1]);
  answer(connection, message.id, {});
  wake_waiters();
}

void Coordinator::cancel(Connection connection, uint64_t id) {
  waiters_.remove_if([&](const Waiter& waiter) {
    if (waiter.connection != connection || waiter.id != id) return false;
    send(connection, {Verb::kLate, id, table_.missing(waiter.keys)});
    return true;
  });
}

void Coordinator::join(Connection connection, const StoreMessage& message, Time now) {
  if (job_failure_) return send(connection, {Verb::kFailed, message.id, to_fields(*job_failure_)});
  const auto& key = field(message, 0);
  const auto& value = field(message, 1);
  if (!table_.find(key)) {
    Member member{static_cast<int>(to_number(field(message, 2))),
                  {field(message, 3), field(message, 4), to_number(field(message, 5))},
                  std::chrono::milliseconds(std::min(to_number(field(message, 6)), kMaxLimitMs)),
                  now,
                  false,
                  "",
                  now};
    table_.set(key, value);
    joined_.insert(member.rank);
    blame_.reset();  // the ranks survived the blamed failure and join again
    members_.insert_or_assign(connection, std::move(member));
  }
  answer(connection, message.id, {*table_.find(key)});
  wake_waiters();
}

void Coordinator::report(Connection connection, const StoreMessage& message, Time now) {
  Report report{connection, message.id, field(message, 0), read_failure(message.fields, 2), now};
  bool is_symptom = field(message, 1) == "symptom";
  if (!is_symptom || job_failure_ || group_failures_.contains(report.group)) {
    resolve(report);
    return finish_reports(now);
  }
  report.due = now + kDiagnosis;
  reports_.push_back(std::move(report));
}

// The reporting rank also receives the notice, and before its answer: the answer goes to a thread that may wake only
// after the client has processed the next notice.
void Coordinator::resolve(const Report& report) {
  bool is_first = false;
  if (!job_failure_) is_first = group_failures_.emplace(report.group, report.failure).second;
  const Failure& cause = job_failure_ ? *job_failure_ : group_failures_.at(report.group);
  if (is_first) send_to_all({Verb::kNotice, 0, in_front(report.group, to_fields(cause))});
  answer(report.connection, report.id, to_fields(cause));
}

void Coordinator::finish_reports(Time now) {
  reports_.remove_if([&](const Report& report) {
    bool is_explained = job_failure_ || group_failures_.contains(report.group);
    auto announced = announced_.find(report.group);
    Time due = announced == announced_.end() ? report.due : std::max(report.due, announced->second);
    if (!is_explained && now < due) return false;
    resolve(report);
    return true;
  });
}

void Coordinator::leave(Connection connection, const StoreMessage& message) {
  const auto member = members_.find(connection);
  if (member == members_.end()) return;
  const auto& group = field(message, 0);
  const int rank = member->second.rank;
  send_to_all({Verb::kLeft, 0, {std::to_string(rank), group, field(message, 1)}}, connection);
  auto& left = left_[group];
  left.insert(rank);
  if (static_cast<int64_t>(left.size()) < to_number(field(message, 2))) return;
  table_.erase_all(field(message, 3));
  left_.erase(group);
  group_failures_.erase(group);
}

// Sends no notice: before a rank blames another rank, it was notified that the rank left, or it reported that the rank
// is late. The program may catch that error, continue, and fail later for an unrelated reason, so the blame expires.
void Coordinator::blame(const StoreMessage& message, Time now) {
  Blame blame{read_failure(message.fields), now};
  if (!blame.failure.culprit) throw ProtocolError("a blame names no rank");
  if (!blame_ || now - blame_->since > kConsequence) blame_ = std::move(blame);
}

void Coordinator::end_job(const Failure& failure, Time now) {
  if (job_failure_) return;
  const bool is_consequence = blame_ && now - blame_->since <= kConsequence;
  job_failure_ = failure;
  first_failure_ = is_consequence ? blame_->failure : failure;
  send_to_all({Verb::kNotice, 0, in_front("", to_fields(failure))});
  for (const auto& waiter : waiters_) send(waiter.connection, {Verb::kFailed, waiter.id, to_fields(failure)});
  waiters_.clear();
}

std::string Coordinator::describe_member(const Member& member) const {
  return text(kind_ == Members::kRanks ? "rank " : "the launcher of node ", member.rank, " (", describe(member.process),
              ")");
}

// A rank that dies soon after it has joined may have made calls that no heartbeat has reported.
std::string Coordinator::last_activity(const Member& member, Time now) {
  const auto since = seconds(now - member.doing_since);
  if (member.doing.empty()) return text("It had joined ", since, " s earlier, and had not reported its activity yet");
  return text("Last activity, ", since, " s earlier: ", member.doing);
}

void Coordinator::lost(Connection connection, const std::string& reason, Time now) {
  connections_.erase(connection);
  waiters_.remove_if([&](const Waiter& waiter) { return waiter.connection == connection; });
  reports_.remove_if([&](const Report& report) { return report.connection == connection; });
  std::erase_if(questions_, [&](const auto& question) { return question.second.connection == connection; });
  for (auto& [id, question] : questions_) question.open.erase(connection);
  auto member = members_.extract(connection);
  if (!member.empty()) {
    const Member& gone = member.mapped();
    std::string message = text(describe_member(gone), " is gone: ", reason);
    if (kind_ == Members::kRanks)
      message +=
          ". It crashed, was killed, or exited without destroying its process group. " + last_activity(gone, now);
    end_job({ErrorKind::kPeer, message, Culprit{gone.rank, CulpritRole::kGone}}, now);
  }
  finish_questions(now);
  finish_reports(now);
}

void Coordinator::leave_job(Connection connection, const StoreMessage& message, Time now) {
  const bool has_failed = !field(message, 0).empty();
  const auto failure = read_failure(message.fields);
  auto member = members_.extract(connection);
  if (!member.empty() && has_failed) {
    const Member& gone = member.mapped();
    end_job({failure.kind, text(describe_member(gone), " gave up: ", without_rank(failure.message, gone.rank)),
             Culprit{gone.rank, CulpritRole::kGaveUp}},
            now);
  }
  send(connection, {Verb::kClosing});
}

void Coordinator::check_heartbeats(Time now) {
  for (auto& [connection, member] : members_) {
    if (now - member.heard < member.limit) continue;
    if (member.traced || is_traced(member.process)) {
      member.heard = now;  // after the debugger detaches, the rank has the full limit again
      continue;
    }
    return end_job({ErrorKind::kPeer,
                    text(describe_member(member), " sent no heartbeat for ", seconds(now - member.heard),
                         " s: the process is stopped, or its host or network is down. ", last_activity(member, now)),
                    Culprit{member.rank, CulpritRole::kSilent}},
                   now);
  }
}

void Coordinator::reset_heartbeats(Time now) {
  for (auto& [connection, member] : members_) member.heard = now;
}

void Coordinator::tick(Time now) {
  if (!job_failure_) check_heartbeats(now);
  std::erase_if(announced_, [&](const auto& entry) { return now >= entry.second; });
  finish_reports(now);
  finish_questions(now);
}

void Coordinator::ask(Connection connection, const StoreMessage& message, Time now) {
  Question question{connection, message.id, {}, {}, now + kAnswerLimit};
  uint64_t id = next_question_++;
  for (const auto& [other, member] : members_) {
    question.open.insert(other);
    send(other, {Verb::kQuestion, id, {field(message, 0), field(message, 1)}});
  }
  questions_.emplace(id, std::move(question));
  finish_questions(now);
}

// A rank processes messages in order, so any answer acknowledges all earlier messages. No client has connection 0, so
// the answers are discarded.
void Coordinator::request_acknowledgements(Time now) {
  acknowledgements_ = next_question_;
  ask(0, {Verb::kAsk, 0, {"", ""}}, now);
}

void Coordinator::forward_note(int sender, const StoreMessage& message) {
  const auto receiver = to_number(field(message, 0));
  for (const auto& [connection, member] : members_)
    if (member.rank == receiver)
      send(connection, {Verb::kNoted, 0, {std::to_string(sender), field(message, 1), field(message, 2)}});
}

void Coordinator::receive_answer(Connection connection, const StoreMessage& message) {
  auto found = questions_.find(static_cast<uint64_t>(to_number(field(message, 0))));
  const auto& given = field(message, 1);
  auto member = members_.find(connection);
  if (found == questions_.end() || member == members_.end()) return;
  if (found->second.open.erase(connection) == 0) return;
  found->second.answers.push_back(std::to_string(member->second.rank));
  found->second.answers.push_back(given);
  if (!found->second.open.empty()) return;
  answer(found->second.connection, found->second.id, std::move(found->second.answers));
  questions_.erase(found);
}

void Coordinator::finish_questions(Time now) {
  for (auto entry = questions_.begin(); entry != questions_.end();) {
    Question& question = entry->second;
    if (!question.open.empty() && now < question.due) {
      ++entry;
      continue;
    }
    answer(question.connection, question.id, std::move(question.answers));
    entry = questions_.erase(entry);
  }
}

}  // namespace lockstep
