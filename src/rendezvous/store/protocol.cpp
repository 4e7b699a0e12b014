#include "rendezvous/store/protocol.h"

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

template <class Number>
void put(std::string& out, Number number) {
  for (size_t byte = 0; byte < sizeof number; ++byte) out.push_back(static_cast<char>(number >> (8 * byte)));
}

template <class Number>
Number take(std::string_view& bytes) {
  if (bytes.size() < sizeof(Number)) throw ProtocolError("the message is truncated");
  Number number = 0;
  for (size_t byte = 0; byte < sizeof number; ++byte)
    number |= static_cast<Number>(static_cast<unsigned char>(bytes[byte])) << (8 * byte);
  bytes.remove_prefix(sizeof number);
  return number;
}

constexpr size_t kLengthBytes = sizeof(uint32_t);
constexpr size_t kHeaderBytes = sizeof(uint8_t) + sizeof(uint64_t);

}  // namespace

std::string pack(const std::vector<std::string>& fields) {
  std::string out;
  for (const auto& field : fields) {
    put(out, static_cast<uint32_t>(field.size()));
    out += field;
  }
  return out;
}

std::vector<std::string> unpack(std::string_view bytes) {
  std::vector<std::string> fields;
  while (!bytes.empty()) {
    auto size = take<uint32_t>(bytes);
    if (fields.size() == Decoder::kMaxFields) throw ProtocolError("too many fields");
    if (size > bytes.size()) throw ProtocolError("a field is truncated");
    fields.emplace_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  return fields;
}

bool fits_in_message(size_t fields, size_t bytes) {
  return fields <= Decoder::kMaxFields && bytes <= Decoder::kMaxBytes &&
         kHeaderBytes + fields * kLengthBytes + bytes <= Decoder::kMaxBytes;
}

std::string encode(const StoreMessage& message) {
  if (message.fields.size() > Decoder::kMaxFields)
    throw UsageError(text("store: a request has ", message.fields.size(), " keys and values; at most ",
                          Decoder::kMaxFields, " are allowed. Use several requests"));
  std::string fields = pack(message.fields);
  if (kHeaderBytes + fields.size() > Decoder::kMaxBytes)
    throw UsageError(text("store: a request has ", fields.size(), " bytes; keys and values together are limited to ",
                          Decoder::kMaxBytes >> 20, " MiB. Send large data through the process group"));
  std::string out;
  put(out, static_cast<uint32_t>(kHeaderBytes + fields.size()));
  put(out, static_cast<uint8_t>(message.verb));
  put(out, message.id);
  return out + fields;
}

std::optional<StoreMessage> Decoder::next() {
  std::string_view left = std::string_view(buffer_).substr(read_);
  if (left.size() < kLengthBytes) return std::nullopt;
  auto size = take<uint32_t>(left);
  if (size < kHeaderBytes || size > kMaxBytes) throw ProtocolError(text("invalid message size: ", size, " bytes"));
  if (left.size() < size) return std::nullopt;
  left = left.substr(0, size);
  StoreMessage message{static_cast<Verb>(take<uint8_t>(left)), 0, {}};
  message.id = take<uint64_t>(left);
  message.fields = unpack(left);
  read_ += kLengthBytes + size;
  if (read_ > buffer_.size() / 2) {
    buffer_.erase(0, read_);
    read_ = 0;
  }
  return message;
}

int64_t to_number(const std::string& field) {
  auto number = parse_number<int64_t>(field);
  if (!number) throw ProtocolError("expected a number");
  return *number;
}

}  // namespace lockstep
