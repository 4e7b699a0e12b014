#pragma once

#include <map>

#include <gtest/gtest.h>

#include "rendezvous/store/coordinator.h"

namespace lockstep {

/// Fixture with a coordinator whose clock the test controls. Connections are numbered from 1.
class CoordinatorTest : public testing::Test {
 protected:
  void SetUp() override {
    for (Coordinator::Connection name : {1, 2, 3}) coordinator_.connected(name);
    coordinator_.take_outgoing();
  }

  void say(Coordinator::Connection from, Verb verb, std::vector<std::string> fields, uint64_t id = 0) {
    coordinator_.received(from, {verb, id, std::move(fields)}, now_);
  }

  void join(Coordinator::Connection from, int rank, std::chrono::milliseconds limit = std::chrono::seconds(5)) {
    say(from, Verb::kJoin,
        {"rank/" + std::to_string(rank), "here", std::to_string(rank), "node" + std::to_string(rank), "boot elsewhere",
         std::to_string(4000 + rank), std::to_string(limit.count())},
        99);
    heard();
  }

  /// Joins ranks 0, 1 and 2 on the connections 1, 2 and 3.
  void join_all() {
    for (int rank : {0, 1, 2}) join(static_cast<Coordinator::Connection>(rank + 1), rank);
  }

  void report(Coordinator::Connection from, const std::string& certainty, const std::string& message, uint64_t id,
              const std::string& group = "world") {
    say(from, Verb::kReport, {group, certainty, "PeerError", message}, id);
  }

  void lose(Coordinator::Connection name) { coordinator_.lost(name, "its connection was closed", now_); }

  void pass(std::chrono::milliseconds time) {
    now_ += time;
    coordinator_.tick(now_);
  }

  /// Returns the messages to each connection since the last call.
  std::map<Coordinator::Connection, std::vector<StoreMessage>> heard() {
    std::map<Coordinator::Connection, std::vector<StoreMessage>> messages;
    for (auto& [to, message] : coordinator_.take_outgoing()) messages[to].push_back(std::move(message));
    return messages;
  }

  /// Returns the single message to `name` since the last call. The test fails if other messages were sent.
  StoreMessage answer_to(Coordinator::Connection name) {
    auto messages = heard();
    EXPECT_EQ(messages.size(), 1u);
    EXPECT_EQ(messages[name].size(), 1u);
    return messages[name].empty() ? StoreMessage{} : messages[name][0];
  }

  Coordinator::Time now_{std::chrono::seconds(1000)};
  Coordinator coordinator_{{"rank 0", {"node0", "boot", 4000}, 0}};
};

inline StoreMessage done(uint64_t id, std::vector<std::string> fields) {
  return {Verb::kDone, id, std::move(fields)};
}

}  // namespace lockstep
