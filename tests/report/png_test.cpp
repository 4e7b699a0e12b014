#include "report/png.h"

#include <zlib.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "support/messages.h"

// Images are decoded by the rules of the PNG specification, and zlib. tensorboard_test.cpp decodes them with Pillow.

namespace lockstep::event_files {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Decoded {
  uint32_t width = 0, height = 0;
  int bits = 0, color = 0;
  std::vector<int> pixels{};
};

uint32_t big_endian(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes.at(at + i));
  return value;
}

Decoded decode(const std::string& png) {
  EXPECT_EQ(png.substr(0, 8), "\x89PNG\r\n\x1a\n");
  std::map<std::string, std::string> chunks;
  for (size_t at = 8; at < png.size();) {
    const uint32_t size = big_endian(png, at);
    const auto checked = png.substr(at + 4, size + 4);
    EXPECT_EQ(big_endian(png, at + 8 + size),
              ::crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(checked.size())));
    chunks[checked.substr(0, 4)] = checked.substr(4);
    at += size + 12;
  }
  EXPECT_TRUE(chunks.contains("IEND"));
  const auto& header = chunks.at("IHDR");
  Decoded image{big_endian(header, 0), big_endian(header, 4), header.at(8), header.at(9)};
  EXPECT_EQ(header.substr(10), std::string(3, '\0'));
  const size_t channels = image.color == 0 ? 1 : image.color == 2 ? 3 : 4, row = 1 + image.width * channels;
  std::string rows(row * image.height, '\0');
  uLongf size = rows.size();
  const auto& data = chunks.at("IDAT");
  EXPECT_EQ(::uncompress(reinterpret_cast<Bytef*>(rows.data()), &size, reinterpret_cast<const Bytef*>(data.data()),
                         data.size()),
            Z_OK);
  EXPECT_EQ(size, rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i % row == 0)
      EXPECT_EQ(rows[i], 0) << "a filter";
    else
      image.pixels.push_back(static_cast<unsigned char>(rows[i]));
  }
  return image;
}

TEST(Png, HasTheImagesPixelsInTheOrderOfRows) {
  const auto rgb = torch::arange(3 * 2 * 5).to(torch::kByte).view({3, 2, 5});
  const auto image = decode(detail::to_png(rgb).bytes);
  EXPECT_EQ(std::tuple(image.width, image.height, image.bits, image.color), std::tuple(5u, 2u, 8, 2));
  ASSERT_EQ(image.pixels.size(), 30u);
  for (int y = 0; y < 2; ++y)
    for (int x = 0; x < 5; ++x)
      for (int c = 0; c < 3; ++c) EXPECT_EQ(image.pixels[(y * 5 + x) * 3 + c], c * 10 + y * 5 + x);
}

TEST(Png, HasGreyAndTransparentImages) {
  EXPECT_EQ(decode(detail::to_png(torch::zeros({4, 3})).bytes).color, 0);
  EXPECT_EQ(decode(detail::to_png(torch::zeros({1, 4, 3})).bytes).color, 0);
  EXPECT_EQ(decode(detail::to_png(torch::zeros({4, 4, 3})).bytes).color, 6);
}

TEST(Png, RoundsNumbersToTheNearestLevel) {
  const auto levels = torch::arange(256);
  EXPECT_EQ(decode(detail::to_png((levels / 255.0).view({16, 16})).bytes).pixels,
            decode(detail::to_png(levels.to(torch::kByte).view({16, 16})).bytes).pixels);
  const auto odd = torch::tensor({-kInfinity, -0.1, std::nan(""), 0.499 / 255, 0.501 / 255, 1.1, kInfinity});
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16})
    EXPECT_EQ(decode(detail::to_png(odd.to(dtype).view({1, 7})).bytes).pixels,
              (std::vector<int>{0, 0, 0, 0, 1, 255, 255}));
}

TEST(Png, ShowsABatchAsAGrid) {
  const auto batch = torch::arange(1, 12).to(torch::kByte).view({11, 1, 1, 1}).expand({11, 1, 2, 3});
  const auto image = decode(detail::to_png(batch).bytes);
  EXPECT_EQ(std::pair(image.width, image.height), std::pair(8u * 3 + 7 * 2, 2u * 2 + 2));
  const auto pixel = [&](int x, int y) { return image.pixels.at(static_cast<size_t>(y) * image.width + x); };
  for (int i = 0; i < 11; ++i)
    for (int y = 0; y < 2; ++y)
      for (int x = 0; x < 3; ++x) EXPECT_EQ(pixel(i % 8 * 5 + x, i / 8 * 4 + y), i + 1);
  EXPECT_EQ(pixel(3, 0), 128);
  EXPECT_EQ(pixel(0, 2), 128);
  EXPECT_EQ(pixel(3 * 5, 4), 128) << "a cell without an image";
}

TEST(Png, RefusesWhatIsNoImage) {
  const auto refused = [](const torch::Tensor& image, const char* what, const char* remedy) {
    expect_error<UsageError>([&] { detail::to_png(image); }, what, remedy);
  };
  refused({}, "undefined", "[H, W]");
  refused(torch::zeros({5}), "[5]", "[C, H, W]");
  refused(torch::zeros({1, 1, 1, 2, 2}), "[1, 1, 1, 2, 2]", "[N, C, H, W]");
  refused(torch::zeros({28, 28, 3}), "28 channels", "permute()");
  refused(torch::zeros({3, 0, 4}), "[3, 0, 4]", "empty");
  refused(torch::zeros({0, 3, 4, 4}), "[0, 3, 4, 4]", "empty");
  refused(torch::zeros({2, 2}, torch::kLong), "Long", "uint8");
  refused(torch::zeros({2, 2}, torch::kComplexFloat), "ComplexFloat", "to()");
  refused(torch::zeros({1}).expand({1 << 14, 1 << 13}), "134217728", "67108864");
}

}  // namespace
}  // namespace lockstep::event_files
