#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <deque>
#include <mutex>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "base/text.h"
#include "base/wait_notice.h"
#include "launch/cluster.h"
#include "rendezvous/store/store_client.h"

// Keys of the launchers' store, where G is the generation and K a node:
//   launch/node/K        set by each node when it joins: see NodeField
//   launch/G/store       the port of the ranks' store, set by node 0
//   launch/G/failure     the first failure seen by a node other than 0: see to_fields
//   launch/G/told        set by node 0 after the ranks were notified of a failure: node, number of joined ranks; the
//                        other nodes then stop their workers
//   launch/G/signals     the number of signals that launchers received; launch/G/signal/1 and so on: number, node
//   launch/G/outcome/K   how the attempt ended on a node
//   launch/G/verdict     set by node 0 after all outcomes are set: the merged outcome, max_restarts, the first cause

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using Fields = StoreClient::Fields;

constexpr int kLaunchers = -1;  // used as generation, so that the launchers' key differs from every key of the ranks
constexpr auto kSilence = std::chrono::seconds(30);     // heartbeat limit of a launcher
constexpr auto kNotifyLimit = std::chrono::seconds(2);  // the ranks have 1 s to acknowledge
constexpr auto kNodeFarewell = std::chrono::seconds(5);
constexpr size_t kShownCommand = 300;  // longest command, in bytes, that is sent to other nodes for messages

/// The fields with which a node joins. The version stays the first field in all versions.
enum NodeField : size_t { kVersion, kHost, kPid, kWorkers, kNodes, kJob, kCommand, kCommandHash };

std::string shown(const std::string& command) {
  return command.size() <= kShownCommand ? command : command.substr(0, kShownCommand) + "...";
}

class SeveralNodes final : public Cluster, private StoreListener {
 public:
  SeveralNodes(const LaunchOptions& options, const Plan& plan, const Secret& secret)
      : options_(options), plan_(plan), secret_(secret), waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!waker_.is_open()) throw SystemError(text("eventfd: ", ::strerror(errno)));
    if (plan_.node.rank == 0)
      control_ = host_store(plan_.node.store, kLaunchers, "the launcher of node 0", Coordinator::Members::kLaunchers);
  }

  ~SeveralNodes() override {
    if (client_) client_->stop_listening();
    if (client_ && !is_over_) client_->leave_job(Failure{ErrorKind::kPeer, "it was stopped, or it failed"});
    client_.reset();
    if (control_) control_->await_departures(kNodeFarewell);  // the other nodes read the verdict from it
  }

  std::optional<Layout> begin(int generation, Signals& signals, const PrintStatus& print_status) override {
    {
      std::lock_guard lock(mutex_);
      generation_ = generation;
      orders_.clear();
      verdict_.reset();
      has_joined_ranks_ = true;
    }
    try {
      if (!client_ && !join(signals, print_status)) return std::nullopt;
      if (!open_store(signals, print_status)) return std::nullopt;
    } catch (const Stopped&) {
      return std::nullopt;
    }
    layout_.generation = generation;
    subscribe();
    wake();  // to handle orders that arrived during the wait
    return layout_;
  }

  void report_failure(const Failure& cause) override {
    const Fields failure{key("failure"), "", pack(to_fields(cause))};
    try {
      if (store_) return notify_ranks(cause);
      Fields late;
      client_->call(Verb::kCompareSet, failure);
      client_->call(Verb::kGet, {key("told")}, Clock::now() + kNotifyLimit, late);
    } catch (const Error&) {
      // Node 0 is gone; the client's thread reports that as well.
    }
  }

  std::optional<std::vector<MissingRank>> missing_ranks() override {
    if (!store_) return std::nullopt;
    const auto joined = store_->joined();
    std::vector<MissingRank> missing;
    int rank = 0;
    for (size_t node = 0; node < nodes_.size(); ++node)
      for (int worker = 0; worker < nodes_[node].workers; ++worker, ++rank)
        if (!joined.contains(rank)) missing.push_back({rank, text("node ", node, " on ", nodes_[node].host)});
    return missing;
  }

  bool has_joined_ranks() override {
    if (store_) return !store_->joined().empty();
    std::lock_guard lock(mutex_);
    return has_joined_ranks_;
  }

  void forward_signal(int number) override {
    client_->call(Verb::kAdd, {key("signals"), "1"},
                  [this, number, base = key("signal/")](std::optional<Fields> count) {
                    if (count)
                      client_->call(Verb::kSet, {base + count->at(0), pack({std::to_string(number), me()})}, ignore);
                  });
  }

  int fd() const override { return waker_.get(); }

  std::optional<int> next_order() override {
    uint64_t count = 0;
    [[maybe_unused]] auto read = ::read(waker_.get(), &count, sizeof count);
    act_as_first_node();
    std::lock_guard lock(mutex_);
    if (orders_.empty()) return std::nullopt;
    const int order = orders_.front();
    orders_.pop_front();
    return order;
  }

  void report_outcome(const Outcome& outcome) override {
    client_->call(Verb::kSet, {key("outcome/" + me()), pack_outcome(outcome)}, ignore);
  }

  std::optional<Verdict> verdict() override {
    std::unique_lock lock(mutex_);
    if (verdict_) {
      is_over_ = !verdict_->restart;
      return verdict_;
    }
    if (lost_.empty()) return std::nullopt;
    const std::string heard = lost_;
    lock.unlock();
    Verdict lost;
    lost.report.exit = LaunchExit::kTimedOut;
    lost.report.message = why_broken().value_or(heard);
    lost.report.restarts = generation_;
    return lost;
  }

 private:
  struct Stopped {};  // thrown if a signal arrives
  struct Node {
    std::string host;
    int workers = 0;
  };

  static void ignore(const std::optional<Fields>&) {}

  std::string me() const { return std::to_string(plan_.node.rank); }
  std::string key(const std::string& name) const { return text("launch/", generation_.load(), "/", name); }
  static std::string node_key(int node) { return text("launch/node/", node); }

  std::unique_ptr<StoreServer> host_store(const Endpoint& endpoint, int generation, const std::string& role,
                                          Coordinator::Members members) const {
    const StoreServer::Options options{endpoint, secret_, generation, role, {}, members};
    return std::make_unique<StoreServer>(options);
  }

  // --- joining

  bool join(Signals& signals, const PrintStatus& print_status) {
    const auto begin = Clock::now();
    const auto deadline = begin + options_.join_timeout;
    WaitNotice notice(begin);
    connect(signals, deadline, notice, print_status);
    client_->listen(this);
    const auto process = this_process();
    const std::string own_fields = pack({LOCKSTEP_VERSION_STRING, process.host, std::to_string(process.pid),
                                         std::to_string(plan_.workers), std::to_string(plan_.node.nodes), plan_.job_id,
                                         shown(in_shell(options_.command)), secret_.hmac(pack(options_.command))});
    const auto found =
        client_->call(Verb::kJoin, {node_key(plan_.node.rank), own_fields, me(), process.host, process.host_id,
                                    std::to_string(process.pid), std::to_string(to_ms(kSilence))});
    if (found.at(0) != own_fields) {
      const auto other = unpack(found.at(0));
      is_over_ = true;  // not a member: the other nodes must not be notified
      check_version(plan_.node.rank, other);
      throw MismatchError(text("--node-rank ", me(), " is taken by pid ", other.at(kPid), " on ", other.at(kHost),
                               ": give every node its own --node-rank"));
    }
    Fields keys;
    for (int node = 0; node < plan_.node.nodes; ++node) keys.push_back(node_key(node));
    auto values = wait_for(keys, signals, deadline, [&](const Fields& missing) {
      if (!notice.is_due(Clock::now())) return;
      print_status(text("has waited ", notice.seconds(Clock::now()), " s for ", name_nodes(missing), " to join at ",
                        to_string(plan_.node.store), " (limit ", seconds(options_.join_timeout),
                        " s); check that lockstep run is started there with its --node-rank"));
    });
    if (values) compare(*values, print_status);
    return values.has_value();
  }

  // StoreClient retries until the deadline, because a slow network may miss the shorter limits of a single attempt.
  void connect(Signals& signals, Clock::time_point deadline, WaitNotice& notice, const PrintStatus& print_status) {
    auto on_wait = [&] {
      if (signals.next()) throw Stopped();
      if (notice.is_due(Clock::now()))
        print_status(text("has waited ", notice.seconds(Clock::now()), " s for node 0 to answer at ",
                          to_string(plan_.node.store), " (limit ", seconds(options_.join_timeout),
                          " s); check that lockstep run is started there with --node-rank 0, and that this node can "
                          "reach it"));
    };
    try {
      client_ = std::make_unique<StoreClient>(
          StoreClient::Options{plan_.node.store, secret_.key(kLaunchers), kLaunchers, deadline, kSilence, on_wait});
    } catch (const TimeoutError& error) {
      throw TimeoutError(text("node 0 did not answer within ", seconds(options_.join_timeout), " s: ", error.what(),
                              "; check that lockstep run is started there with --node-rank 0, and that this node can "
                              "reach it"));
    }
  }

  struct Awaited {  // guarded by mutex_
    explicit Awaited(size_t keys) : values(keys) {}
    std::vector<std::optional<std::string>> values;
    bool has_failed = false;
  };

  /// Blocks until all keys have values and returns them; none if a signal arrives. Throws TimeoutError at the deadline.
  /// Calls `on_wait` periodically with the keys that have no value yet. The requests are asynchronous, so that signals
  /// are handled even if node 0 is frozen.
  std::optional<Fields> wait_for(const Fields& keys, Signals& signals, std::optional<Clock::time_point> deadline,
                                 const std::function<void(const Fields&)>& on_wait) {
    auto awaited = std::make_shared<Awaited>(keys.size());
    for (size_t i = 0; i < keys.size(); ++i)
      client_->call(Verb::kGet, {keys[i]}, [this, awaited, i](std::optional<Fields> value) {
        std::lock_guard lock(mutex_);
        if (value)
          awaited->values[i] = value->at(0);
        else
          awaited->has_failed = true;
        wake();
      });
    for (;;) {
      Fields values, missing;
      bool has_failed = false;
      {
        std::lock_guard lock(mutex_);
        for (size_t i = 0; i < keys.size(); ++i)
          awaited->values[i] ? values.push_back(*awaited->values[i]) : missing.push_back(keys[i]);
        has_failed = awaited->has_failed;
      }
      if (missing.empty()) return values;
      if (has_failed) return client_->call(Verb::kGet, keys);  // throws the reason
      if (signals.next()) return std::nullopt;
      if (deadline && Clock::now() >= *deadline) refuse_missing(missing);
      on_wait(missing);
      pollfd ready[2] = {{signals.fd(), POLLIN, 0}, {waker_.get(), POLLIN, 0}};
      ::poll(ready, 2, static_cast<int>(kBetweenCalls.count()));
      uint64_t count = 0;
      [[maybe_unused]] auto read = ::read(waker_.get(), &count, sizeof count);
    }
  }

  std::string name_nodes(const Fields& keys) const {
    std::vector<std::string> nodes;
    for (const auto& missing : keys) nodes.push_back(missing.substr(node_key(0).size() - 1));
    return text(nodes.size() == 1 ? "node " : "nodes ", enumerate(nodes), " of ", plan_.node.nodes);
  }

  [[noreturn]] void refuse_missing(const Fields& keys) {
    const auto message = text(name_nodes(keys), " did not join within ", seconds(options_.join_timeout),
                              " s; check that lockstep run is started there with its --node-rank");
    client_->leave_job(Failure{ErrorKind::kTimeout, message});
    is_over_ = true;
    throw TimeoutError(message);
  }

  /// `joined` are the fields with which a node has joined.
  void check_version(int node, const Fields& joined) const {
    if (joined.at(kVersion) == LOCKSTEP_VERSION_STRING) return;
    throw MismatchError(text("node ", node, joined.size() > kHost ? text(" on ", joined[kHost]) : "", " has lockstep ",
                             joined.at(kVersion), ", node ", me(), " has ", LOCKSTEP_VERSION_STRING,
                             ": install the same version on all nodes"));
  }

  void compare(const Fields& values, const PrintStatus& print_status) {
    layout_ = {};
    layout_.world_size = 0;
    nodes_.clear();
    for (int node = 0; node < plan_.node.nodes; ++node) {
      const auto value = unpack(values.at(static_cast<size_t>(node)));
      check_version(node, value);
      const int workers = static_cast<int>(to_number(value.at(kWorkers)));
      if (value.at(kNodes) != std::to_string(plan_.node.nodes))
        throw MismatchError(text("node ", node, " on ", value.at(kHost), " was started with --nnodes ",
                                 value.at(kNodes), ", node ", me(), " with ", plan_.node.nodes,
                                 ": pass the same --nnodes on all nodes"));
      if (node < plan_.node.rank) layout_.first_rank += workers;
      layout_.world_size += workers;
      nodes_.push_back({value.at(kHost), workers});
      if (node == 0) layout_.job_id = value.at(kJob);
    }
    warn_about_commands(values, print_status);
  }

  /// Nodes may run different commands on purpose, so a difference is no error. Node 0 names the first node whose
  /// command differs; each other node names itself.
  void warn_about_commands(const Fields& values, const PrintStatus& print_status) const {
    const auto first = unpack(values.at(0));
    std::vector<int> others;
    for (int node = 1; node < plan_.node.nodes; ++node)
      if (unpack(values.at(static_cast<size_t>(node))).at(kCommandHash) != first.at(kCommandHash))
        others.push_back(node);
    const int me = plan_.node.rank;
    if (others.empty() || (me != 0 && std::find(others.begin(), others.end(), me) == others.end())) return;
    const int named = me == 0 ? others.front() : me;
    const auto other = unpack(values.at(static_cast<size_t>(named)));
    print_status(text("warning: nodes run different commands: node 0 on ", first.at(kHost), " runs ",
                      first.at(kCommand), ", node ", named, " on ", other.at(kHost), " runs ", other.at(kCommand),
                      first.at(kCommand) == other.at(kCommand) ? " (they differ further on)" : "",
                      me == 0 && others.size() > 1 ? text(", ", others.size() - 1, " more differ from node 0") : "",
                      "; start the same program with the same arguments on all nodes"));
  }

  bool open_store(Signals& signals, const PrintStatus& print_status) {
    if (plan_.node.rank == 0) {
      store_.reset();
      store_ =
          host_store({plan_.node.store.host, 0}, generation_, "lockstep run of node 0", Coordinator::Members::kRanks);
      client_->call(Verb::kSet, {key("store"), std::to_string(store_->port())});
    }
    WaitNotice notice(Clock::now());
    const auto port = wait_for({key("store")}, signals, std::nullopt, [&](const Fields&) {
      if (notice.is_due(Clock::now()))
        print_status(text("has waited ", notice.seconds(Clock::now()), " s for node 0 at ", to_string(plan_.node.store),
                          " to start attempt ", generation_.load()));
    });
    if (port) layout_.store = {plan_.node.store.host, static_cast<int>(to_number(port->at(0)))};
    return port.has_value();
  }

  // --- notifications from other nodes, on the client's thread

  void subscribe() {
    if (plan_.node.rank == 0) {
      when(key("failure"), [this](const std::string& value) { failure_ = value; });
      Fields outcomes;
      for (int node = 0; node < plan_.node.nodes; ++node) outcomes.push_back(key(text("outcome/", node)));
      client_->call(Verb::kGet, outcomes, [this, generation = generation_.load()](std::optional<Fields> values) {
        std::lock_guard lock(mutex_);
        if (values && generation == generation_) outcomes_ = *values;
        wake();
      });
    }
    when(key("told"), [this](const std::string& value) {
      const auto fields = unpack(value);
      has_joined_ranks_ = fields.at(1) != "0";
      if (fields.at(0) != me()) orders_.push_back(0);
    });
    when(key("verdict"), [this](const std::string& value) { verdict_ = unpack_verdict(value); });
    listen_for_signal(key("signal/"), 1);
  }

  void listen_for_signal(const std::string& base, int count) {
    when(
        base + std::to_string(count),
        [this](const std::string& value) {
          const auto signal = unpack(value);
          if (signal.at(1) != me()) orders_.push_back(static_cast<int>(to_number(signal.at(0))));
        },
        [this, base, count] { listen_for_signal(base, count + 1); });
  }

  /// Once the key has a value, and if the generation has not changed, calls `then` with mutex_ held and `after`
  /// without.
  void when(const std::string& name, std::function<void(const std::string&)> then, std::function<void()> after = {}) {
    client_->call(Verb::kGet, {name},
                  [this, then = std::move(then), after = std::move(after),
                   generation = generation_.load()](std::optional<Fields> values) {
                    std::unique_lock lock(mutex_);
                    if (generation != generation_) return;
                    if (values)
                      then(values->at(0));
                    else if (lost_.empty() && !verdict_)
                      mark_lost("the launcher of node 0 is gone");  // verdict() gets the details from the client
                    wake();
                    lock.unlock();
                    if (values && after) after();
                  });
  }

  void mark_lost(const std::string& why) {  // requires mutex_
    lost_ = why;
    orders_.push_back(0);
  }

  void on_failure(const std::string&, const Failure& failure) override {
    std::lock_guard lock(mutex_);
    if (lost_.empty() && !verdict_) mark_lost(failure.message);
    wake();
  }
  void on_left(int, const std::string&, int64_t) override {}
  std::string on_question(const std::string&, const std::string&) override { return ""; }
  std::string doing() override { return "launching"; }
  void on_tick() override {}

  void wake() {
    uint64_t one = 1;
    [[maybe_unused]] auto written = ::write(waker_.get(), &one, sizeof one);
  }

  /// Returns why the connection to node 0 is lost; none if it is not.
  std::optional<std::string> why_broken() const {
    try {
      client_->call(Verb::kCheck, {node_key(0)});
      return std::nullopt;
    } catch (const Error& error) {
      return error.what();
    }
  }

  // --- node 0

  void act_as_first_node() {
    std::optional<std::string> failure;
    std::optional<Fields> outcomes;
    {
      std::lock_guard lock(mutex_);
      failure.swap(failure_);
      outcomes.swap(outcomes_);
    }
    if (failure) {
      notify_ranks(read_failure(unpack(*failure)));
      std::lock_guard lock(mutex_);
      orders_.push_back(0);
    }
    if (outcomes) publish_verdict(*outcomes);
  }

  void notify_ranks(const Failure& cause) {
    store_->end_job(cause);
    client_->call(Verb::kSet, {key("told"), pack({me(), std::to_string(store_->joined().size())})}, ignore);
  }

  void publish_verdict(const Fields& outcomes) {
    Outcome all;
    for (const auto& packed : outcomes) {
      auto outcome = unpack_outcome(packed);
      all.ends.insert(all.ends.end(), outcome.ends.begin(), outcome.ends.end());
      if (outcome.signal && !all.signal) all.signal = outcome.signal;
      if (all.broken.empty()) all.broken = outcome.broken;
    }
    const auto cause = store_->first_cause();
    client_->call(Verb::kSet,
                  {key("verdict"), pack({pack_outcome(all), std::to_string(options_.max_restarts),
                                         cause ? pack(to_fields(*cause)) : ""})},
                  ignore);
  }

  // --- encoding

  static std::string pack_outcome(const Outcome& outcome) {
    return pack({pack_ends(outcome.ends), std::to_string(outcome.signal.value_or(0)), outcome.broken});
  }

  static Outcome unpack_outcome(const std::string& packed) {
    const auto fields = unpack(packed);
    Outcome outcome;
    outcome.ends = unpack_ends(fields.at(0));
    if (const auto signal = static_cast<int>(to_number(fields.at(1))); signal != 0) outcome.signal = signal;
    outcome.broken = fields.at(2);
    return outcome;
  }

  Verdict unpack_verdict(const std::string& packed) const {  // the same on all nodes
    const auto fields = unpack(packed);
    std::optional<Failure> cause;
    if (!fields.at(2).empty()) cause = read_failure(unpack(fields.at(2)));
    return decide(unpack_outcome(fields.at(0)), cause, generation_, static_cast<int>(to_number(fields.at(1))));
  }

  static int64_t to_ms(std::chrono::milliseconds time) { return time.count(); }
  static double seconds(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

  const LaunchOptions options_;
  const Plan plan_;
  const Secret secret_;
  const FileDescriptor waker_;
  std::unique_ptr<StoreServer> control_;  // node 0 only, constant after construction: the launchers' store
  std::unique_ptr<StoreServer> store_;    // node 0 only: the store of the ranks of this attempt
  std::vector<Node> nodes_;               // set after all nodes have joined
  Layout layout_;
  bool is_over_ = false;  // leaving is not a failure for the other nodes

  std::atomic<int> generation_ = 0;  // set by the main thread
  std::mutex mutex_;
  std::deque<int> orders_;               // guarded by mutex_
  std::optional<std::string> failure_;   // guarded by mutex_: seen by another node; node 0 only
  std::optional<Fields> outcomes_;       // guarded by mutex_: of all nodes; node 0 only
  std::optional<Verdict> verdict_;       // guarded by mutex_
  bool has_joined_ranks_ = true;         // guarded by mutex_: true until node 0 reports otherwise
  std::string lost_;                     // guarded by mutex_: why the cluster cannot continue
  std::unique_ptr<StoreClient> client_;  // last member, so that its thread ends first
};

}  // namespace

std::unique_ptr<Cluster> make_several_nodes(const LaunchOptions& options, const Plan& plan, const Secret& secret) {
  return std::make_unique<SeveralNodes>(options, plan, secret);
}

}  // namespace lockstep
