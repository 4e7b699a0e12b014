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

/// The logic of the job's store, without sockets and clocks: the owner passes in messages and times, and sends the
/// messages that take_outgoing() returns. Not thread-safe.
///
/// State: the keys and values, the clients that wait for keys, the connections that are ranks' liveness connections,
/// and the failure of each group and of the job. All ranks receive the same failure: the first cause.
class Coordinator {
 public:
  using Connection = uint64_t;  // assigned by the owner
  using Time = std::chrono::steady_clock::time_point;

  struct Outgoing {
    Connection to;
    StoreMessage message;
  };

  /// How long a reported symptom ("the connection to rank 2 broke") waits for its cause (the loss of rank 2's liveness
  /// connection).
  static constexpr auto kDiagnosis = std::chrono::milliseconds(300);
  /// How long symptoms of a group wait for a report that was announced by kWillReport.
  static constexpr auto kAnnounced = std::chrono::milliseconds(2500);
  /// A job failure within this time after a kBlame message is a consequence of that blame.
  static constexpr auto kConsequence = std::chrono::seconds(10);
  /// Time limit for the ranks' answers to a question.
  static constexpr auto kAnswerLimit = std::chrono::seconds(1);

  /// What the processes of the job are, in messages.
  enum class Members { kRanks, kLaunchers };

  /// The process that hosts the store.
  struct Host {
    std::string role;  // in messages: "rank 0", "lockstep run"
    ProcessId process;
    std::optional<int> rank{};  // none if it is not a rank
  };

  explicit Coordinator(const Host& host, Members kind = Members::kRanks);

  void connected(Connection connection);
  /// Notes that bytes of this connection have arrived: a sign of life, also in the middle of a message.
  void heard(Connection connection, Time now);
  /// Throws ProtocolError for an invalid message; the owner should then close the connection.
  void received(Connection connection, const StoreMessage& message, Time now);
  /// Removes a closed connection. `reason` is human-readable. If the connection was a liveness connection, the
  /// job fails.
  void lost(Connection connection, const std::string& reason, Time now);
  /// Handles expired deadlines. Call it about every 50 ms.
  void tick(Time now);
  /// Resets the heartbeat deadline of every rank. Call it after the owner has not read messages for a while.
  void reset_heartbeats(Time now);

  /// Ends the job with this failure. Does nothing if the job has ended already. If a rank was blamed within
  /// kConsequence before, first_failure() comes from that blame, because this failure is then its consequence.
  void end_job(const Failure& failure, Time now);
  /// Asks all ranks to acknowledge the messages sent so far.
  void request_acknowledgements(Time now);
  /// Returns whether all ranks have acknowledged, or kAnswerLimit has passed.
  bool all_acknowledged() const { return !questions_.contains(acknowledgements_); }
  /// The failure that all ranks receive; none while the job runs.
  const std::optional<Failure>& job_failure() const { return job_failure_; }
  /// The root cause; none while the job runs. Its culprit is the rank that failed first, if the cause is a rank.
  const std::optional<Failure>& first_failure() const { return first_failure_; }

  /// Returns the messages to send, in order, and clears the queue.
  std::vector<Outgoing> take_outgoing();

  /// The number of keys that have a value.
  size_t keys() const { return table_.size(); }
  /// The number of connected ranks.
  size_t members() const { return members_.size(); }
  /// All ranks that have joined so far, including ranks that have left.
  const std::set<int>& joined() const { return joined_; }

 private:
  struct Waiter {
    Connection connection;
    uint64_t id;
    std::vector<std::string> keys;
    size_t next = 0;  // keys before this index had a value at the last check
  };
  struct Member {
    int rank;
    ProcessId process;
    std::chrono::milliseconds limit;
    Time heard;
    bool traced = false;
    std::string doing;  // empty until the first report
    Time doing_since;   // when the rank reported `doing`; before, when it joined
  };
  struct Blame {
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
    std::set<Connection> open;           // ranks that have not answered
    std::vector<std::string> answers{};  // rank, answer, rank, answer...
    Time due;
  };

  void send(Connection to, StoreMessage message);
  void answer(Connection to, uint64_t id, std::vector<std::string> fields);
  void refuse(Connection to, uint64_t id, std::string why);
  void send_to_all(const StoreMessage& message, std::optional<Connection> except = std::nullopt);

  void get(Connection connection, const StoreMessage& message);
  void append(Connection connection, const StoreMessage& message);
  void multi_set(Connection connection, const StoreMessage& message);
  void cancel(Connection connection, uint64_t id);
  bool is_satisfied(Waiter& waiter) const;
  void wake_waiters();
  void answer_with_values(const Waiter& waiter);
  void join(Connection connection, const StoreMessage& message, Time now);
  void report(Connection connection, const StoreMessage& message, Time now);
  void ask(Connection connection, const StoreMessage& message, Time now);
  void forward_note(int sender, const StoreMessage& message);
  void receive_answer(Connection connection, const StoreMessage& message);
  void finish_questions(Time now);
  void finish_reports(Time now);
  void leave(Connection connection, const StoreMessage& message);
  void blame(const StoreMessage& message, Time now);
  void leave_job(Connection connection, const StoreMessage& message, Time now);
  void check_heartbeats(Time now);

  void resolve(const Report& report);
  std::string describe_member(const Member& member) const;
  static std::string last_activity(const Member& member, Time now);

  const StoreMessage welcome_;
  const Members kind_;
  KeyTable table_;
  std::set<Connection> connections_;
  std::list<Waiter> waiters_;
  std::map<Connection, Member> members_;
  std::set<int> joined_;
  std::optional<Blame> blame_;  // the first blame within the last kConsequence
  std::optional<Failure> job_failure_;
  std::optional<Failure> first_failure_;
  std::map<std::string, Failure> group_failures_;
  std::map<std::string, std::set<int>> left_;  // group -> ranks that have left it, until all have
  std::list<Report> reports_;
  std::map<std::string, Time> announced_;  // group -> deadline of its announced report
  std::map<uint64_t, Question> questions_;
  uint64_t next_question_ = 1;
  uint64_t acknowledgements_ = 0;  // id of the question of request_acknowledgements()
  std::vector<Outgoing> outgoing_;
};

}  // namespace lockstep
