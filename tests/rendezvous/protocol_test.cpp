#include "rendezvous/store/protocol.h"

#include <limits>

#include <lockstep/error.h>

#include "support/messages.h"

namespace lockstep {
namespace {

std::string all_bytes() {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  return bytes;
}

std::vector<StoreMessage> some_messages() {
  return {{Verb::kHeartbeatReply, 0, {}},
          {Verb::kSet, 1, {"key", "value"}},
          {Verb::kSet, std::numeric_limits<uint64_t>::max(), {"", ""}},
          {Verb::kGet, 0x0123456789abcdef, std::vector<std::string>(1000, "k")},
          {Verb::kNotice, 2, {all_bytes(), std::string(1, '\0'), std::string(100000, 'x')}},
          {Verb::kClosing, 3, {""}}};
}

std::vector<StoreMessage> drain(Decoder& decoder) {
  std::vector<StoreMessage> messages;
  while (auto message = decoder.next()) messages.push_back(*message);
  return messages;
}

std::vector<StoreMessage> decode(const std::string& bytes) {
  Decoder decoder;
  decoder.feed(bytes);
  return drain(decoder);
}

std::string little_endian(uint32_t number) {
  std::string bytes;
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>(number >> shift));
  return bytes;
}

TEST(Wire, WhatIsEncodedIsDecoded) {
  for (const auto& message : some_messages()) EXPECT_EQ(decode(encode(message)), std::vector<StoreMessage>{message});
}

TEST(Wire, HasTheFormThatItsContractSays) {
  const std::string bytes("\x0f\0\0\0\x01\x02\x01\0\0\0\0\0\0\x02\0\0\0hi", 19);
  EXPECT_EQ(encode({Verb::kSet, 0x0102, {"hi"}}), bytes);
}

TEST(Decoder, NeedsNoWholeMessagesAtOnce) {
  std::string stream;
  for (const auto& message : some_messages()) stream += encode(message);
  Decoder decoder;
  std::vector<StoreMessage> messages;
  for (char byte : stream) {
    decoder.feed({&byte, 1});
    for (auto& message : drain(decoder)) messages.push_back(std::move(message));
  }
  EXPECT_EQ(messages, some_messages());
}

TEST(Decoder, CutsSeveralMessagesOutOfOneFeed) {
  std::string stream;
  for (const auto& message : some_messages()) stream += encode(message);
  EXPECT_EQ(decode(stream), some_messages());
  for (size_t cut : {size_t{1}, size_t{5}, stream.size() / 2, stream.size() - 1}) {
    Decoder decoder;
    decoder.feed(std::string_view(stream).substr(0, cut));
    auto messages = drain(decoder);
    decoder.feed(std::string_view(stream).substr(cut));
    for (auto& message : drain(decoder)) messages.push_back(std::move(message));
    EXPECT_EQ(messages, some_messages()) << cut;
  }
}

TEST(Decoder, SaysNothingBeforeTheLastByte) {
  const auto bytes = encode({Verb::kSet, 7, {"key", "value"}});
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_THAT(decode(bytes.substr(0, size)), testing::IsEmpty());
}

// Before the bytes have come: a length alone must not make it wait, or set memory aside, for what is no message.
TEST(Decoder, RefusesLengthsThatNoMessageHas) {
  for (uint32_t length : {uint32_t{0}, uint32_t{8}, static_cast<uint32_t>(Decoder::kMaxBytes) + 1, ~uint32_t{0}})
    expect_error<ProtocolError>([&] { decode(little_endian(length)); }, std::to_string(length) + " bytes");
  EXPECT_THAT(decode(little_endian(9)), testing::IsEmpty());
  EXPECT_THAT(decode(little_endian(Decoder::kMaxBytes)), testing::IsEmpty());
}

TEST(Decoder, RefusesFieldsThatReachBeyondTheMessage) {
  const std::string header = std::string("\x01", 1) + std::string(8, '\0');
  for (const std::string& fields : {std::string("\x05\0\0\0four", 8), std::string("\x01\0\0", 3),
                                    std::string("\xff\xff\xff\xff", 4), std::string("\x01\0\0\0ax", 6)}) {
    // What follows would be enough: it belongs to the next message.
    const auto bytes = little_endian(static_cast<uint32_t>(header.size() + fields.size())) + header + fields;
    expect_error<ProtocolError>([&] { decode(bytes + std::string(64, '\0')); }, "truncated");
  }
}

TEST(Decoder, RefusesMoreFieldsThanAnyMessageHas) {
  const std::vector<std::string> most(1 << 20);
  const auto packed = pack(most);
  EXPECT_EQ(unpack(packed).size(), most.size());
  expect_error<ProtocolError>([&] { unpack(packed + pack({""})); }, "too many fields");
}

TEST(Encoding, RefusesWhatNoDecoderTakes) {
  const size_t overhead = 9 + 4;
  const auto largest = encode({Verb::kSet, 0, {std::string(Decoder::kMaxBytes - overhead, 'x')}});
  Decoder decoder;
  decoder.feed(largest);
  ASSERT_TRUE(decoder.next().has_value());
  expect_error<UsageError>(
      [&] {
        encode({Verb::kSet, 0, {std::string(Decoder::kMaxBytes - overhead + 1, 'x')}});
      },
      "64 MiB", "process group");
}

TEST(Encoding, RefusesMoreFieldsThanADecoderTakes) {
  const std::vector<std::string> most(Decoder::kMaxFields);
  EXPECT_EQ(decode(encode({Verb::kMultiSet, 1, most})).at(0).fields.size(), most.size());
  auto more = most;
  more.emplace_back();
  expect_error<UsageError>(
      [&] {
        encode({Verb::kMultiSet, 1, more});
      },
      std::to_string(more.size()), std::to_string(most.size()), "several requests");
}

TEST(Encoding, TakesWhatFitsIntoAMessage) {
  for (const size_t fields : {1, 2, 3}) {
    const size_t most = Decoder::kMaxBytes - 9 - 4 * fields;
    EXPECT_TRUE(fits_in_message(fields, most));
    EXPECT_FALSE(fits_in_message(fields, most + 1));
    std::vector<std::string> values(fields);
    values.back() = std::string(most, 'x');
    EXPECT_NO_THROW(encode({Verb::kDone, 1, values}));
    values.front() += 'x';
    EXPECT_THROW(encode({Verb::kDone, 1, values}), UsageError);
  }
  EXPECT_TRUE(fits_in_message(Decoder::kMaxFields, 0));
  EXPECT_FALSE(fits_in_message(Decoder::kMaxFields + 1, 0));
  EXPECT_FALSE(fits_in_message(1, std::numeric_limits<size_t>::max()));
}

TEST(Packing, IsUndoneByUnpacking) {
  for (const std::vector<std::string>& list :
       {std::vector<std::string>{}, {""}, {"", ""}, {"a", "", all_bytes()}, std::vector<std::string>(5000, "x")})
    EXPECT_EQ(unpack(pack(list)), list);
}

TEST(Packing, RefusesWhatItDidNotMake) {
  const auto bytes = pack({"one", "two"});
  for (size_t size = 1; size < bytes.size(); ++size)
    if (size != pack({"one"}).size())
      expect_error<ProtocolError>([&] { unpack(std::string_view(bytes).substr(0, size)); }, "truncated");
}

TEST(Number, IsTheWholeField) {
  EXPECT_EQ(to_number("0"), 0);
  EXPECT_EQ(to_number("-9223372036854775808"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(to_number("9223372036854775807"), std::numeric_limits<int64_t>::max());
  for (const char* field : {"", " 1", "1 ", "+1", "1.0", "0x1", "one", "9223372036854775808", "--1"})
    expect_error<ProtocolError>([&] { to_number(field); }, "expected a number");
}

}  // namespace
}  // namespace lockstep
