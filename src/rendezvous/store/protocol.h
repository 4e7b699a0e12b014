#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// What is said over the connection between a process and the job's store. The fields of each stand beside it.
enum class Verb : uint8_t {
  // A process asks; the answer (kDone, kLate, kRefused or kFailed) carries the same id.
  kSet = 1,         // key, value
  kGet = 2,         // keys...: answered with their values as soon as all have one
  kCancel = 3,      // the id of a kGet, which is then answered kLate
  kAdd = 4,         // key, amount: answered with the sum
  kCompareSet = 5,  // key, expected, desired: answered with the value afterwards
  kCheck = 6,       // keys...: answered "1" or "0"
  kErase = 7,       // key: answered "1" or "0"
  kEnrol =
      8,  // key, value, rank, host, host id, pid, heartbeat limit in ms: sets the key if it has no value, and if it
          // did, this connection is the rank's life line; answered with the value afterwards
  kReport = 9,  // group, kind, message, "certain" or "symptom": answered with the kind and message of the first cause
  kAsk = 10,    // group, subject: answered with a rank and its answer for every rank that has given one

  // A process says.
  kBeat = 20,        // what it is doing, "traced" or ""
  kAnswer = 21,      // the id of a kQuestion, the answer
  kWillReport = 24,  // group: a report follows, before which no symptom of another is taken for the cause
  kLeave = 22,       // group, number of calls made on it
  kBlame = 25,       // rank, kind, message: this process is about to fail with this error because of that rank
  kGoodbye = 23,     // kind, message of its failure, both "" when all went well: ends the life line

  // The store answers.
  kDone = 40,     // as said above
  kLate = 41,     // the keys that have no value
  kRefused = 42,  // message: the request makes no sense
  kFailed = 43,   // kind, message: the job is over

  // The store says.
  kWelcome = 50,   // who hosts it, host, host id, pid
  kBeatBack = 51,  //
  kNotice = 52,    // group or "" for the whole job, kind, message
  kQuestion = 53,  // group, subject; its id is for the answer
  kLeft = 54,      // rank, group, number of calls it made
  kClosing = 55,   // the store ends in order
};

struct StoreMessage {
  Verb verb{};
  uint64_t id = 0;
  std::vector<std::string> fields{};

  bool operator==(const StoreMessage&) const = default;
};

/// The other side does not speak this language. The connection is of no further use.
class ProtocolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The bytes of a message: the length of what follows (u32), verb (u8), id (u64), then each field with its length
/// (u32); numbers little-endian.
std::string encode(const StoreMessage& message);

/// Cuts a stream of bytes into messages.
class Decoder {
 public:
  static constexpr size_t kMostBytes = 64 << 20;  // of one message

  void feed(std::string_view bytes) { buffer_.append(bytes); }

  /// The next whole message, if there is one. ProtocolError when the bytes are no message.
  std::optional<StoreMessage> next();

 private:
  std::string buffer_;
  size_t read_ = 0;  // how much of the buffer has been cut off already
};

/// Lists of strings as one string, in the form of a message's fields.
std::string pack(const std::vector<std::string>& fields);
/// ProtocolError when `bytes` are not what pack() makes.
std::vector<std::string> unpack(std::string_view bytes);

/// A field as a number; ProtocolError when it is none.
int64_t to_number(const std::string& field);

}  // namespace lockstep
