#include "report/png.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {
namespace {

constexpr int64_t kGridColumns = 8;  // of a grid, at most
constexpr int64_t kGridLine = 2;     // pixels between the images of a grid
constexpr int kGridGrey = 128;       // of the lines
constexpr int64_t kMaxPixelBytes = 64 << 20;

void check_image(const at::Tensor& image) {
  constexpr const char* kShapes = "expected [H, W], [C, H, W] or [N, C, H, W] with 1, 3 or 4 channels";
  if (!image.defined()) throw UsageError(text("an image is an undefined tensor; ", kShapes));
  if (image.dim() < 2 || image.dim() > 4) throw UsageError(text("an image has shape ", image.sizes(), "; ", kShapes));
  const int64_t channels = image.dim() == 2 ? 1 : image.size(-3);
  if (channels != 1 && channels != 3 && channels != 4)
    throw UsageError(text("an image of shape ", image.sizes(), " has ", channels, " channels; ", kShapes,
                          ". Channels come before height and width: use permute() for [H, W, C]"));
  if (image.numel() == 0) throw UsageError(text("an image of shape ", image.sizes(), " is empty; ", kShapes));
  const bool is_float = at::isFloatingType(image.scalar_type());
  if (image.scalar_type() != at::kByte && !is_float)
    throw UsageError(text("an image has dtype ", image.scalar_type(),
                          ", expected uint8 from 0 to 255 or floating point from 0 to 1; convert it with to()"));
  if (image.numel() > kMaxPixelBytes)
    throw UsageError(text("an image of shape ", image.sizes(), " has ", image.numel(),
                          " bytes of pixels, expected at most ", kMaxPixelBytes,
                          "; write a part of it or a smaller one"));
}

/// To uint8 on the CPU.
at::Tensor to_pixels(const at::Tensor& image) {
  auto pixels = image.detach();
  if (pixels.scalar_type() != at::kByte) {
    pixels = at::nan_to_num(pixels.to(at::kFloat), /*nan=*/0.0, /*posinf=*/1.0, /*neginf=*/0.0);
    pixels = pixels.mul(255).round().clamp(0, 255).to(at::kByte);
  }
  return pixels.cpu();
}

/// From [N, C, H, W] to [C, height, width].
at::Tensor to_grid(const at::Tensor& images) {
  const int64_t count = images.size(0), height = images.size(2), width = images.size(3);
  const int64_t columns = std::min(count, kGridColumns), rows = (count + columns - 1) / columns;
  auto grid =
      at::full({images.size(1), rows * (height + kGridLine) - kGridLine, columns * (width + kGridLine) - kGridLine},
               kGridGrey, images.options());
  for (int64_t i = 0; i < count; ++i)
    grid.narrow(1, i / columns * (height + kGridLine), height)
        .narrow(2, i % columns * (width + kGridLine), width)
        .copy_(images[i]);
  return grid;
}

void add_big_endian(std::string& bytes, uint32_t value) {
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift);
}

void add_chunk(std::string& png, const char* type, const std::string& data) {
  add_big_endian(png, static_cast<uint32_t>(data.size()));
  const size_t begin = png.size();
  png += type;
  png += data;
  add_big_endian(
      png, static_cast<uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(png.data()) + begin, png.size() - begin)));
}

std::string deflated(const std::string& bytes) {
  auto size = ::compressBound(bytes.size());
  std::string result(size, '\0');
  const int status = ::compress(reinterpret_cast<Bytef*>(result.data()), &size,
                                reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  if (status != Z_OK)
    throw SystemError(text("zlib cannot compress an image of ", bytes.size(), " bytes: out of memory"));
  result.resize(size);
  return result;
}

}  // namespace

Png to_png(const at::Tensor& image) {
  check_image(image);
  auto pixels = to_pixels(image);
  if (pixels.dim() == 2) pixels = pixels.unsqueeze(0);
  if (pixels.dim() == 4) pixels = to_grid(pixels);
  pixels = pixels.permute({1, 2, 0}).contiguous();

  Png png{.width = pixels.size(1), .height = pixels.size(0), .channels = pixels.size(2)};
  const auto row_bytes = static_cast<size_t>(png.width * png.channels);
  const auto* row = reinterpret_cast<const char*>(pixels.data_ptr<uint8_t>());
  std::string rows;
  rows.reserve(static_cast<size_t>(png.height) * (1 + row_bytes));
  for (int64_t y = 0; y < png.height; ++y, row += row_bytes) {
    rows += '\0';  // no filter
    rows.append(row, row_bytes);
  }

  std::string header;
  add_big_endian(header, static_cast<uint32_t>(png.width));
  add_big_endian(header, static_cast<uint32_t>(png.height));
  header += '\x08';                                                            // bits for each channel
  header += png.channels == 1 ? '\x00' : png.channels == 3 ? '\x02' : '\x06';  // grey, RGB, RGBA
  header.append(3, '\0');  // deflate, filters by row, no interlacing
  png.bytes = "\x89PNG\r\n\x1a\n";
  add_chunk(png.bytes, "IHDR", header);
  add_chunk(png.bytes, "IDAT", deflated(rows));
  add_chunk(png.bytes, "IEND", "");
  return png;
}

}  // namespace lockstep::detail
