#include "comm/object_bytes.h"

#include <random>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep {
namespace {

c10::IValue through_bytes(const c10::IValue& object) {
  return from_bytes(to_bytes(object));
}

c10::IValue every_kind() {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("step", 7);
  dict.insert("list", c10::List<std::string>({"a", "b"}));
  c10::Dict<int64_t, at::Tensor> tensors;
  tensors.insert(3, at::arange(6).view({2, 3}).t());
  return c10::ivalue::Tuple::create({c10::IValue(), true, -5, 2.5, c10::complex<double>(1, -1), std::string("a\0b", 3),
                                     at::ones({2, 2}, at::kHalf), dict, tensors, std::vector<int64_t>{1, 2},
                                     std::vector<double>(), c10::List<c10::List<bool>>(), at::Tensor()});
}

TEST(ObjectBytes, KeepEveryKindOfValue) {
  const auto object = every_kind();
  const auto back = through_bytes(object);
  EXPECT_EQ(to_bytes(back), to_bytes(object));
  const auto& items = back.toTupleRef().elements();
  EXPECT_TRUE(items[0].isNone());
  EXPECT_TRUE(items[1].toBool());
  EXPECT_EQ(items[2].toInt(), -5);
  EXPECT_EQ(items[3].toDouble(), 2.5);
  EXPECT_EQ(items[4].toComplexDouble(), c10::complex<double>(1, -1));
  EXPECT_EQ(items[5].toStringRef(), std::string("a\0b", 3));
  EXPECT_TRUE(items[6].toTensor().equal(at::ones({2, 2}, at::kHalf)));
  EXPECT_EQ(items[7].toGenericDict().at("step").toInt(), 7);
  EXPECT_EQ(items[9].toIntVector(), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(items[10].isDoubleList());
  EXPECT_EQ(*items[11].type(), *c10::ListType::create(c10::ListType::ofBools()));
  EXPECT_FALSE(items[12].toTensor().defined());
}

TEST(ObjectBytes, KeepTheStridesAndFlagsOfTensors) {
  const auto transposed = at::arange(6, at::kFloat).view({2, 3}).t();
  EXPECT_EQ(through_bytes(transposed).toTensor().strides(), transposed.strides());
  EXPECT_TRUE(through_bytes(transposed).toTensor().equal(transposed));
  const auto expanded = at::ones({1}).expand({4});
  EXPECT_TRUE(through_bytes(expanded).toTensor().equal(at::ones({4})));
  EXPECT_TRUE(through_bytes(at::ones({2}).requires_grad_()).toTensor().requires_grad());
  EXPECT_EQ(through_bytes(at::empty({0, 5})).toTensor().sizes(), at::IntArrayRef({0, 5}));
}

TEST(ObjectBytes, RefuseWhatTheyCannotKeep) {
  EXPECT_THROW(to_bytes(c10::Device("cpu")), ObjectError);
  EXPECT_THROW(to_bytes(at::ones({2}, at::device(at::kMeta))), ObjectError);
  EXPECT_THROW(to_bytes(at::ones({2}).to_sparse()), ObjectError);
  c10::IValue nested = 1;
  for (int i = 0; i < 200; ++i) nested = c10::ivalue::Tuple::create({nested});
  EXPECT_THROW(to_bytes(nested), ObjectError);
}

TEST(ObjectBytes, RefuseMalformedBytes) {
  const auto number = [](int64_t value) { return std::string(reinterpret_cast<char*>(&value), sizeof value); };
  const auto huge = number(int64_t{1} << 62);
  const auto flt = number(static_cast<int64_t>(at::kFloat)) + number(0);
  for (const auto& bytes :
       {std::string(), std::string("X"), std::string("I"), "S" + huge, "U" + huge, "LI" + huge, "S" + number(-1),
        "I" + number(1) + "N",                                                // bytes after the object
        "LI" + number(1) + "S" + number(0),                                   // a string in a list of integers
        "ML" + std::string("II") + number(0),                                 // lists as keys
        "T" + number(999) + number(0) + number(0),                            // no such dtype
        "T" + flt + number(1) + huge + number(1),                             // more elements than bytes
        "T" + flt + number(2) + huge + huge + number(1) + number(1),          // the product overflows
        "T" + flt + number(1) + number(2) + huge + std::string(8, 'x'),       // strides out of range
        "T" + flt + number(1) + number(2) + number(0) + std::string(8, 'x'),  // elements that overlap
        "T" + flt + number(1) + number(-2) + number(1), std::string(5000, 'L'), std::string(5000, 'O')})
    EXPECT_THROW(from_bytes(bytes), ObjectError) << bytes.substr(0, 20);
}

// LibTorch's pickle reader crashes within a few thousand of these.
TEST(ObjectBytes, AnyDamageIsAnErrorOrAnotherObject) {
  const auto whole = to_bytes(every_kind());
  std::mt19937 random(20261117);
  int refused = 0;
  constexpr int kTries = 20000;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    auto bytes = whole;
    for (auto changes = 1 + random() % 4; changes > 0 && !bytes.empty(); --changes) {
      const auto at = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
          break;
        case 2:
          bytes.erase(at, 1 + random() % 8);
          break;
        case 3:
          bytes.insert(at, std::string(1 + random() % 6, static_cast<char>(random())));
          break;
      }
    }
    try {
      to_bytes(from_bytes(bytes));
    } catch (const ObjectError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, kTries / 2);
}

}  // namespace
}  // namespace lockstep
