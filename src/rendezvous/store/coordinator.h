#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "rendezvous/failure.h"
#include "rendezvous/process_id.h"
#include "rendezvous/store/key_table.h"
#include "rendezvous/store/protocol.h"

namespace lockstep {

/// What the job's store answers and whom it tells what, apart from sockets and clocks: messages and times go in,
/// messages come out. One thread at a time.
///
/// It knows the values, who waits for which, which connections are the life lines of ranks, and why a group or the job
/// is over. The first cause is the one that everybody is told.
class Coordinator {
 public:
  using Connection = uint64_t;  // as the owner numbers them
  using Time = std::chrono::steady_clock::time_point;

  struct Outgoing {
    Connection to;
    StoreMessage message;
  };

  /// How long a symptom ("the connection to rank 2 broke") waits for its cause (rank 2's life line breaks).
  static constexpr auto kDiagnosis = std::chrono::milliseconds(300);
  /// How long an announced report is waited for.
  static constexpr auto kAnnounced = std::chrono::milliseconds(2500);
  /// A rank that ends so soon after some rank was blamed ends because of it.
  static constexpr auto kConsequence = std::chrono::seconds(10);
  /// How long ranks may take to answer a question.
  static constexpr auto kAnswerLimit = std::chrono::seconds(1);

  explicit Coordinator(std::string host_role, ProcessId host);

  void connected(Connection connection);
  /// ProtocolError when the message makes no sense: the owner should end the connection.
  void received(Connection connection, const StoreMessage& message, Time now);
  /// The connection is no more; `how` says why, for people.
  void lost(Connection connection, const std::string& how, Time now);
  /// Does what is due. To be called at least every 50 ms or so.
  void tick(Time now);
  /// The owner did not look at messages for a while: silence until now means nothing.
  void excuse_silence(Time now);

  /// The job is over, for this reason and because of this rank, if it is not already. When another rank was blamed
  /// shortly before, that one is the failed_rank() and its failure the first_failure(): this one is a consequence.
  void end_job(const Failure& failure, std::optional<int64_t> rank, Time now);
  /// Asks the ranks for a sign that they have taken in what they were told so far.
  void ask_for_signs(Time now);
  /// Whether all have given it, or have had the time to.
  bool has_signs() const { return !questions_.contains(signs_); }
  /// Why the job is over, as all ranks are told.
  const std::optional<Failure>& job_failure() const { return job_failure_; }
  /// What began it, when the job is over, and the rank that was the first to fail where one was.
  const std::optional<Failure>& first_failure() const { return first_failure_; }
  std::optional<int64_t> failed_rank() const { return failed_rank_; }

  /// What is to be sent, in order.
  std::vector<Outgoing> take_outgoing();

  /// The ranks whose life lines are connected.
  size_t members() const { return members_.size(); }
  /// The ranks that ever had one.
  const std::set<int64_t>& joined() const { return joined_; }

 private:
  struct Waiter {
    Connection connection;
    uint64_t id;
    std::vector<std::string> keys;
    size_t next = 0;  // those before it had a value when last looked
  };
  struct Member {
    int64_t rank;
    ProcessId process;
    std::chrono::milliseconds limit;
    Time heard;
    bool traced = false;
    std::string doing;
  };
  struct Blame {
    int64_t rank;
    Failure failure;
    Time since;
  };
  struct Report {
    Connection connection;
    uint64_t id;
    std::string group;
    Failure failure;
    Time due;
  };
  struct Question {
    Connection connection;
    uint64_t id;
    std::set<Connection> open;           // who has not answered
    std::vector<std::string> answers{};  // rank, answer, rank, answer...
    Time due;
  };

  void send(Connection to, StoreMessage message);
  void answer(Connection to, uint64_t id, std::vector<std::string> fields);
  void tell_all(const StoreMessage& message, std::optional<Connection> but = std::nullopt);

  void get(Connection connection, const StoreMessage& message);
  void cancel(Connection connection, uint64_t id);
  bool is_satisfied(Waiter& waiter) const;
  void wake_waiters();
  void enrol(Connection connection, const StoreMessage& message, Time now);
  void report(Connection connection, const StoreMessage& message, Time now);
  void ask(Connection connection, const StoreMessage& message, Time now);
  void take_answer(Connection connection, const StoreMessage& message);
  void finish_questions(Time now);
  void finish_reports(Time now);
  void blame(const StoreMessage& message, Time now);
  void goodbye(Connection connection, const Failure& failure, Time now);
  void find_silent(Time now);

  void resolve(const Report& report);
  std::string describe_member(const Member& member) const;

  const StoreMessage welcome_;
  KeyTable table_;
  std::set<Connection> connections_;
  std::list<Waiter> waiters_;
  std::map<Connection, Member> members_;
  std::set<int64_t> joined_;
  std::optional<Blame> blame_;  // the first of the last kConsequence, while the job goes on
  std::optional<Failure> job_failure_;
  std::optional<Failure> first_failure_;
  std::optional<int64_t> failed_rank_;
  std::map<std::string, Failure> group_failures_;
  std::list<Report> reports_;
  std::map<std::string, Time> announced_;  // groups that a report was announced for, and until when it is waited for
  std::map<uint64_t, Question> questions_;
  uint64_t next_question_ = 1;
  uint64_t signs_ = 0;  // the question that asks for signs
  std::vector<Outgoing> outgoing_;
};

}  // namespace lockstep
