#include <lockstep/safetensors.h>

#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

using testing::HasSubstr;

std::string safetensors(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

std::string refusal_of(const std::string& bytes) {
  try {
    from_safetensors(bytes);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no UsageError";
}

TEST(Safetensors, ComeBackAsTheyWere) {
  std::map<std::string, at::Tensor> tensors;
  for (auto type : {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong, torch::kHalf,
                    torch::kBFloat16, torch::kFloat, torch::kDouble})
    tensors[toString(type)] = torch::arange(-3, 3).reshape({2, 3}).to(type);
  tensors["a name \"with\" ü"] = torch::arange(6).reshape({2, 3}).t();
  tensors["empty"] = torch::empty({0, 7});
  tensors["number"] = torch::tensor(2.5);
  const auto read = from_safetensors(to_safetensors(tensors));
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(read.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(torch::equal(read.at(name), tensor)) << name;
  }
  EXPECT_TRUE(from_safetensors(to_safetensors({})).empty());
}

// The format is not ours: these are the bytes that others write and expect.
TEST(Safetensors, AreThoseOfTheFormat) {
  const std::string header = R"({"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}  )";
  ASSERT_EQ(header.size() % 8, 0u);
  EXPECT_EQ(to_safetensors({{"x", torch::tensor({1, 258}, torch::kShort)}}), safetensors(header, {1, 0, 2, 1}));

  const auto read =
      from_safetensors(safetensors(R"({"__metadata__":{"by":"me"},"b":{"dtype":"U8","shape":[],"data_offsets":[2,3]},)"
                                   R"("a":{"shape":[2,1],"data_offsets":[0,2],"dtype":"I8"}})",
                                   {1, '\xfe', 3}));
  EXPECT_EQ(read.size(), 2u);
  EXPECT_TRUE(torch::equal(read.at("a"), torch::tensor({1, -2}, torch::kChar).reshape({2, 1})));
  EXPECT_TRUE(torch::equal(read.at("b"), torch::tensor(3, torch::kByte)));
}

TEST(Safetensors, RefuseWhatIsNone) {
  const auto one = [](const std::string& entry, const std::string& data = "12345678") {
    return refusal_of(safetensors("{\"x\":" + entry + "}", data));
  };
  EXPECT_THAT(refusal_of("1234567"), HasSubstr("got 7 bytes, expected 8 or more"));
  EXPECT_THAT(refusal_of(std::string(8, '\xff') + "{}"),
              HasSubstr("the header claims 18446744073709551615 bytes, but there are only 2"));
  EXPECT_THAT(refusal_of(safetensors("{", "")), HasSubstr("the header cannot be read"));
  EXPECT_THAT(refusal_of(safetensors("[]", "")), HasSubstr("not a JSON object"));
  EXPECT_THAT(refusal_of(safetensors("{}", "1")), HasSubstr("tensors end at byte 0, expected 1"));
  EXPECT_THAT(one("3"), HasSubstr("tensor 'x'"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[2]})"), HasSubstr("data_offsets"));
  EXPECT_THAT(one(R"({"dtype":"F99","shape":[2],"data_offsets":[0,8]})"), HasSubstr("of type 'F99'"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"), HasSubstr("fewer than two data_offsets"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"),
              HasSubstr("has data_offsets [8,0] in 8 bytes"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,9]})"),
              HasSubstr("has data_offsets [0,9] in 8 bytes"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})"), HasSubstr("end at byte 4, expected 8"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), HasSubstr("begins at 4, expected 0"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), HasSubstr("-2 is not an integer"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[4294967296,4294967297],"data_offsets":[0,8]})"),
              HasSubstr("has an extent of 4294967297"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[9223372036854775807,0,9223372036854775807],"data_offsets":[0,8]})"),
              HasSubstr("has an extent of 9223372036854775807"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[0,7],"data_offsets":[0,8]})"), HasSubstr("of 0 bytes has data_offsets"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"),
              HasSubstr("claims 12 bytes, but there are only 8"));
  EXPECT_THAT(one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), HasSubstr("2.0 is not an integer"));
  for (const char* shape : {"[1000000000]", "[]"})  // with no bytes at all
    EXPECT_THAT(one(text(R"({"dtype":"F32","shape":)", shape, R"(,"data_offsets":[0,0]})"), ""),
                HasSubstr("bytes, but there are only 0"));
  EXPECT_THAT(refusal_of(safetensors(R"({"x":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                                     R"("y":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
                                     "12345678")),
              HasSubstr("begins at 0, expected 8"));
  EXPECT_THROW(to_safetensors({{"x", torch::zeros({1}, torch::kComplexFloat)}}), UsageError);
  EXPECT_THROW(to_safetensors({{"x", at::Tensor()}}), UsageError);
  EXPECT_THROW(to_safetensors({{"__metadata__", torch::ones({1})}}), UsageError);
  EXPECT_THROW(to_safetensors({{"\xff", torch::ones({1})}}), UsageError);
}

TEST(Safetensors, GiveTensorsOrAnErrorForAnyCorruption) {
  const auto whole = to_safetensors({{"data", torch::rand({3, 5})}, {"target", torch::tensor(4)}});
  int errors = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    errors += refusal_of(whole.substr(0, i)) != "no UsageError";
    for (int flip : {1, 8, 64, 128}) {
      auto damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      errors += refusal_of(damaged) != "no UsageError";
    }
  }
  EXPECT_GT(errors, static_cast<int>(whole.size()));
}

}  // namespace
}  // namespace lockstep
