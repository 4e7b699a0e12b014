#include "comm/watch/fingerprint.h"

#include <algorithm>
#include <cstring>

#include "backends/common/reduction.h"
#include "base/text.h"
#include "rendezvous/store/protocol.h"

namespace lockstep::detail {

std::string describe(const CallId& call_id) {
  if (call_id.message)
    return text("message ", call_id.number, " from rank ", call_id.message->from, " to rank ", call_id.message->to,
                " with tag ", call_id.message->tag);
  return text(call_id.unordered ? name_of(*call_id.unordered) : "call", ' ', call_id.number);
}

namespace {

/// Hashes whole words and mixes each into all bits of the result, because users may take any part of the bits.
class Hasher {
 public:
  void add(std::string_view bytes) {
    add(static_cast<int64_t>(bytes.size()));
    for (; !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), sizeof(int64_t)))) {
      int64_t word = 0;
      std::memcpy(&word, bytes.data(), std::min(bytes.size(), sizeof(word)));
      add(word);
    }
  }
  void add(int64_t number) {
    uint64_t h = (state_ ^ static_cast<uint64_t>(number)) + 0x9e3779b97f4a7c15;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9;
    h = (h ^ (h >> 27)) * 0x94d049bb133111eb;
    state_ = h ^ (h >> 31);
  }
  uint64_t result() const { return state_; }

 private:
  uint64_t state_ = 0;
};

template <class Value>
int64_t number(const std::optional<Value>& value) {
  return value ? static_cast<int64_t>(*value) : -1;
}

int64_t join(int64_t high, int64_t low) {
  return high << 32 | (low & 0xffffffff);
}

template <class Value>
std::optional<Value> optional_of(int64_t number) {
  if (number < 0) return std::nullopt;
  return static_cast<Value>(number);
}

std::string write_list(const std::vector<int64_t>& list) {
  std::vector<std::string> fields;
  for (int64_t item : list) fields.push_back(std::to_string(item));
  return pack(fields);
}

std::vector<int64_t> read_list(const std::string& bytes) {
  std::vector<int64_t> list;
  for (const auto& field : unpack(bytes)) list.push_back(to_number(field));
  return list;
}

// The two ends of a message count as the same operation.
Operation common(Operation operation) {
  return operation == Operation::kRecv ? Operation::kSend : operation;
}

int64_t at_or_zero(const std::vector<int64_t>& list, int rank) {
  return rank >= 0 && static_cast<size_t>(rank) < list.size() ? list[rank] : 0;
}

}  // namespace

std::string describe(const Fingerprint& call) {
  std::vector<std::string> parts;
  if (call.reduce_op) parts.push_back(name_of(*call.reduce_op));
  if (call.dtype) parts.push_back(call.elements ? text(*call.dtype, '[', *call.elements, ']') : text(*call.dtype));
  if (call.root) parts.push_back(text("root ", *call.root));
  if (!call.detail.empty()) parts.push_back(call.detail);
  auto list = [](const std::vector<int64_t>& counts) {
    std::string joined;
    for (size_t r = 0; r < counts.size() && r < 8; ++r) joined += text(r ? " " : "", counts[r]);
    return joined + (counts.size() > 8 ? " ..." : "");
  };
  if (!call.sends.empty()) parts.push_back(text("sends ", list(call.sends)));
  if (!call.receives.empty()) parts.push_back(text("receives ", list(call.receives)));
  std::string joined;
  for (const auto& part : parts) joined += (joined.empty() ? "" : ", ") + part;
  return text(name_of(call.operation), '(', joined, ')');
}

uint64_t hash(const Fingerprint& call, const CallId& call_id) {
  Hasher hasher;
  hasher.add(call_id.number);
  if (call_id.message) {
    hasher.add(join(call_id.message->from, call_id.message->to));
    hasher.add(call_id.message->tag);
  }
  if (!call.detail.empty()) hasher.add(call.detail);
  hasher.add(number(call.elements));
  // Fits into one word: there are fewer than 255 operations, dtypes and reduce operations.
  int64_t kinds =
      static_cast<int64_t>(common(call.operation)) | (number(call.dtype) + 1) << 8 | (number(call.reduce_op) + 1) << 16;
  hasher.add(join(kinds, number(call.root)));
  return hasher.result();
}

std::optional<std::string> difference(const Fingerprint& call, int rank, const Fingerprint& other, int other_rank) {
  if (common(call.operation) != common(other.operation)) return "the operation";
  if (call.reduce_op != other.reduce_op) return "the reduce operation";
  if (call.dtype != other.dtype) return "the dtype";
  if (call.elements != other.elements) return "the number of elements";
  if (call.root != other.root) return "the root";
  if (call.detail != other.detail && call.operation == Operation::kReduceRanges)
    return "the changes of this rank before the call";
  if (call.detail != other.detail) return call.dtype ? "the list of tensors" : "the definition of the group";
  if (at_or_zero(call.sends, other_rank) != at_or_zero(other.receives, rank) ||
      at_or_zero(call.receives, other_rank) != at_or_zero(other.sends, rank))
    return "the number of elements between the two";
  return std::nullopt;
}

std::string write(const Fingerprint& call) {
  auto field = [](const auto& value) { return std::to_string(number(value)); };
  return pack({std::to_string(static_cast<int>(call.operation)), field(call.dtype), field(call.elements),
               field(call.reduce_op), field(call.root), call.detail, write_list(call.sends),
               write_list(call.receives)});
}

Fingerprint read_fingerprint(const std::string& bytes) {
  auto fields = unpack(bytes);
  if (fields.size() != 8) throw ProtocolError("malformed fingerprint");
  int64_t operation = to_number(fields[0]);
  if (operation < 0 || operation >= static_cast<int64_t>(kOperationNames.size()))
    throw ProtocolError(text("unknown operation ", operation));
  return {static_cast<Operation>(operation),
          optional_of<c10::ScalarType>(to_number(fields[1])),
          optional_of<int64_t>(to_number(fields[2])),
          optional_of<ReduceOp>(to_number(fields[3])),
          optional_of<int>(to_number(fields[4])),
          fields[5],
          read_list(fields[6]),
          read_list(fields[7])};
}

}  // namespace lockstep::detail
