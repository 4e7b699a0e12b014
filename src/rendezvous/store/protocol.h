#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// The message types between a process and the job's store. The comment of each verb lists its fields.
enum class Verb : uint8_t {
  // Requests of a process. The answer (kDone, kLate, kRefused or kFailed) carries the same id.
  kSet = 1,         // key, value
  kGet = 2,         // keys...: answered with their values once all keys have one
  kCancel = 3,      // id of a kGet, which is then answered with kLate
  kAdd = 4,         // key, amount: answered with the sum
  kCompareSet = 5,  // key, expected, desired: answered with the resulting value
  kCheck = 6,       // keys...: answered "1" or "0"
  kErase = 7,       // key: answered "1" or "0"
  // key, value, rank, host, host id, pid, heartbeat limit in ms: if the key has no value, sets it and makes this
  // connection the rank's liveness connection. Answered with the resulting value.
  kJoin = 8,
  kReport = 9,     // group, "certain" or "symptom", failure (see to_fields): answered with the first cause
  kAsk = 10,       // group, subject: answered with rank, answer, rank, answer... of all ranks that answered in time
  kAppend = 11,    // key, value: appends the value to that of the key
  kMultiSet = 12,  // key, value, key, value...: sets all keys

  // Notifications of a process.
  kBeat = 20,        // current activity, "traced" or ""
  kAnswer = 21,      // id of a kQuestion, answer
  kWillReport = 24,  // group: a kReport follows; until then no symptom of the group becomes its cause
  // group, number of calls made on it, number of members, prefix of the group's keys: once all members have left, the
  // keys are erased
  kLeave = 22,
  kNote = 26,      // rank, group, content: forwarded to that rank as kNoted; dropped if the rank has left
  kBlame = 25,     // failure with a culprit: this process is about to fail because of that rank
  kLeaveJob = 23,  // its failure, with kind and message "" on success: ends the liveness connection

  // Answers of the store.
  kDone = 40,     // see the request
  kLate = 41,     // the keys that have no value
  kRefused = 42,  // message: the request is invalid
  kFailed = 43,   // failure: the job has failed

  // Notifications of the store.
  kWelcome = 50,         // role of the hosting process, host, host id, pid, rank or ""
  kHeartbeatReply = 51,  // no fields: answers kBeat
  kNotice = 52,          // group, or "" for the whole job, failure
  kQuestion = 53,        // group, subject; kAnswer refers to its id
  kLeft = 54,            // rank, group, number of calls made on it
  kClosing = 55,         // the store shuts down cleanly
  kNoted = 56,           // sending rank, group, content
};

struct StoreMessage {
  Verb verb{};
  uint64_t id = 0;
  std::vector<std::string> fields{};

  bool operator==(const StoreMessage&) const = default;
};

/// The peer violated the protocol. The connection cannot be used any more.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Encodes a message: the length of the remainder (u32), verb (u8), id (u64), then each field preceded by its length
/// (u32). Numbers are little-endian. Throws UsageError if the message is larger than Decoder::kMaxBytes, or has more
/// than Decoder::kMaxFields fields.
std::string encode(const StoreMessage& message);

/// Splits a byte stream into messages. Not thread-safe.
class Decoder {
 public:
  static constexpr size_t kMaxBytes = 64 << 20;  // per message, without its length field
  static constexpr size_t kMaxFields = 1 << 20;  // per message

  void feed(std::string_view bytes) { buffer_.append(bytes); }

  /// Returns the next complete message, if any. Throws ProtocolError if the bytes are not a message.
  std::optional<StoreMessage> next();

 private:
  std::string buffer_;
  size_t read_ = 0;  // bytes of the buffer that are consumed
};

/// Returns whether a message may have this number of fields with this number of bytes together.
bool fits_in_message(size_t fields, size_t bytes);

/// Encodes a list of strings as one string, in the format of a message's fields.
std::string pack(const std::vector<std::string>& fields);
/// The inverse of pack(). Throws ProtocolError if `bytes` are malformed.
std::vector<std::string> unpack(std::string_view bytes);

/// Parses a field as a number. Throws ProtocolError if it is not one.
int64_t to_number(const std::string& field);

}  // namespace lockstep
