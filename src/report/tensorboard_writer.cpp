// Overview.
//
// Each call writes one Event: wall time, step, and a Summary with one value. The field numbers are those of
// TensorFlow's event.proto, summary.proto, histogram.proto and tensor.proto, which never change. Scalars, histograms
// and images have the fields that all versions of TensorBoard read; text is a tensor of strings.
//
// A resumed run announces itself with a SessionLog of status START, on which TensorBoard's Python loader drops records
// of older files. Its newer loader, written in Rust, ignores that: it drops a tag's records when a step of this tag
// repeats.

#include <lockstep/tensorboard_writer.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "report/event_file.h"
#include "report/png.h"

namespace lockstep {
namespace {

using detail::ProtoMessage;

constexpr size_t kMaxTextBytes = 64 << 20;

// --- messages

ProtoMessage new_event(int64_t step) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return ProtoMessage().add_double(1, now.count()).add_int(2, step);
}

ProtoMessage file_version_event() {
  return new_event(0).add_bytes(3, "brain.Event:2");
}

ProtoMessage session_start_event(int64_t step) {
  constexpr int64_t kStart = 1;
  return new_event(step).add_message(7, ProtoMessage().add_int(1, kStart));
}

ProtoMessage summary_event(int64_t step, const ProtoMessage& value) {
  return new_event(step).add_message(5, ProtoMessage().add_message(1, value));
}

ProtoMessage text_tensor(std::string_view content) {
  constexpr int64_t kString = 7;
  return ProtoMessage().add_int(1, kString).add_message(2, ProtoMessage()).add_bytes(8, content);  // no dimensions
}

ProtoMessage metadata_of_plugin(std::string_view name) {
  return ProtoMessage().add_message(1, ProtoMessage().add_bytes(1, name));
}

// --- UTF-8: protocol buffers with other strings cannot be read

/// The length of the UTF-8 character that `bytes` begins with; 0 if they begin with none.
size_t length_of_character(std::string_view bytes) {
  const auto byte = [&](size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0u; };
  const auto continues = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool is_overlong = first == 0xe0 && second < 0xa0, is_surrogate = first == 0xed && second > 0x9f;
    return continues(1) && continues(2) && !is_overlong && !is_surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool is_overlong = first == 0xf0 && second < 0x90, is_too_large = first == 0xf4 && second > 0x8f;
    return continues(1) && continues(2) && continues(3) && !is_overlong && !is_too_large ? 4 : 0;
  }
  return 0;
}

/// Replaces bytes that are not UTF-8.
std::string to_utf8(std::string_view bytes) {
  std::string result;
  result.reserve(bytes.size());
  while (!bytes.empty()) {
    const size_t length = length_of_character(bytes);
    result += length > 0 ? bytes.substr(0, length) : "\xef\xbf\xbd";
    bytes.remove_prefix(std::max<size_t>(length, 1));
  }
  return result;
}

void check_tag(std::string_view tag) {
  if (tag.empty()) throw UsageError("TensorBoardWriter: a tag is empty; name the record, for example \"train/loss\"");
  if (const auto shown = to_utf8(tag); shown != tag)
    throw UsageError(text("TensorBoardWriter: the tag '", shown, "' is not UTF-8; use a tag in UTF-8"));
}

// --- histograms

/// The limits of Python's SummaryWriter: 1e-12, 10% more each time up to 1e20, their negatives, and 0. Element i is the
/// upper limit of bucket i. The last bucket, which Python does not have, is for greater values.
std::vector<double> make_bucket_limits() {
  std::vector<double> positive, limits;
  for (double limit = 1e-12; limit < 1e20; limit *= 1.1) positive.push_back(limit);
  for (auto limit = positive.rbegin(); limit != positive.rend(); ++limit) limits.push_back(-*limit);
  limits.push_back(0);
  limits.insert(limits.end(), positive.begin(), positive.end());
  limits.push_back(std::numeric_limits<double>::max());
  return limits;
}

struct Histogram {
  int64_t count = 0, not_finite = 0;
  double min = 0, max = 0, sum = 0, sum_of_squares = 0;
  std::vector<double> counts{}, limits{};
};

void check_histogram_values(const at::Tensor& values) {
  if (!values.defined()) throw UsageError("TensorBoardWriter::histogram: the tensor is undefined");
  if (values.layout() != at::kStrided || values.is_quantized())
    throw UsageError(text("TensorBoardWriter::histogram: the tensor is ",
                          values.is_quantized() ? "quantized" : "not strided (sparse, for example)",
                          "; pass dequantize(), to_dense() or the values of a sparse tensor"));
  if (values.is_complex())
    throw UsageError(text("TensorBoardWriter::histogram: dtype ", values.scalar_type(),
                          " is complex; pass abs(), or real and imaginary part separately"));
}

/// Counts on the tensor's device, part by part, because counting needs memory for several copies of a part.
Histogram histogram_of(const at::Tensor& values) {
  constexpr int64_t kPart = 4 << 20;
  static const auto limits = make_bucket_limits();
  const auto options = values.options().dtype(at::kDouble).requires_grad(false);
  const auto inner_limits =
      at::tensor(at::ArrayRef<double>(limits).slice(0, limits.size() - 1), at::kDouble).to(values.device());
  auto counts = at::zeros({static_cast<int64_t>(limits.size())}, options.dtype(at::kLong));
  auto sums = at::zeros({2}, options);
  std::vector<at::Tensor> extremes;
  Histogram histogram;
  if (values.numel() > 0)
    for (const auto& part : values.detach().reshape({-1}).split(kPart)) {
      auto numbers = part.to(at::kDouble);
      const auto is_finite = at::isfinite(numbers);
      if (!is_finite.all().item<bool>()) numbers = numbers.masked_select(is_finite);
      histogram.not_finite += part.numel() - numbers.numel();
      histogram.count += numbers.numel();
      if (numbers.numel() == 0) continue;
      // A bucket includes its lower limit and excludes its upper limit.
      const auto buckets = at::bucketize(numbers, inner_limits, /*out_int32=*/true, /*right=*/true);
      counts += at::bincount(buckets, /*weights=*/{}, counts.numel());
      sums += at::stack({numbers.sum(), numbers.square().sum()});
      extremes.push_back(at::stack({numbers.min(), numbers.max()}));
    }
  if (histogram.count == 0) return histogram;

  const auto totals = sums.cpu(), ends = at::stack(extremes).cpu();
  histogram.sum = totals[0].item<double>();
  histogram.sum_of_squares = totals[1].item<double>();
  histogram.min = ends.select(1, 0).min().item<double>();
  histogram.max = ends.select(1, 1).max().item<double>();

  // Without the empty buckets at both ends, except one: its limit is where the first bucket that is not empty begins.
  const auto all = counts.cpu().to(at::kDouble);
  const double* begin = all.data_ptr<double>();
  const double* end = begin + all.numel();
  const auto is_used = [](double count) { return count > 0; };
  const double* first = std::find_if(begin, end, is_used);
  if (first != begin) --first;
  while (!is_used(end[-1])) --end;
  histogram.counts.assign(first, end);
  histogram.limits.assign(limits.begin() + (first - begin), limits.begin() + (end - begin));
  return histogram;
}

ProtoMessage histogram_message(const Histogram& histogram) {
  return ProtoMessage()
      .add_double(1, histogram.min)
      .add_double(2, histogram.max)
      .add_double(3, static_cast<double>(histogram.count))
      .add_double(4, histogram.sum)
      .add_double(5, histogram.sum_of_squares)
      .add_doubles(6, histogram.limits)
      .add_doubles(7, histogram.counts);
}

std::unique_ptr<detail::EventFile> open_event_file(const std::string& folder, const TensorBoardWriterOptions& options) {
  if (options.first_step < 0)
    throw UsageError(text("TensorBoardWriterOptions: first_step is ", options.first_step, ", expected 0 or more"));
  if (options.suffix.find('/') != std::string::npos)
    throw UsageError(
        text("TensorBoardWriterOptions: suffix '", options.suffix, "' contains '/'; it is part of a file's name"));
  return std::make_unique<detail::EventFile>(folder.empty() ? "." : folder, options.suffix);
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::string& folder, const TensorBoardWriterOptions& options)
    : file_(open_event_file(folder, options)) {
  file_->append(file_version_event());
  // TensorBoard takes the first START in a folder for the beginning of the run and only later ones for a restart. Older
  // files have no START.
  if (options.first_step > 0)
    for (int start = 0; start < 2; ++start) file_->append(session_start_event(options.first_step));
}

TensorBoardWriter::~TensorBoardWriter() = default;

void TensorBoardWriter::scalar(std::string_view tag, double value, int64_t step) {
  check_tag(tag);
  file_->append(summary_event(step, ProtoMessage().add_bytes(1, tag).add_float(2, static_cast<float>(value))));
}

void TensorBoardWriter::histogram(std::string_view tag, const at::Tensor& values, int64_t step) {
  check_tag(tag);
  check_histogram_values(values);
  const auto histogram = histogram_of(values);
  file_->append(summary_event(step, ProtoMessage().add_bytes(1, tag).add_message(5, histogram_message(histogram))));
  if (histogram.not_finite > 0)
    scalar(std::string(tag) + "/not_finite", static_cast<double>(histogram.not_finite), step);
}

void TensorBoardWriter::text(std::string_view tag, std::string_view markdown, int64_t step) {
  check_tag(tag);
  if (markdown.size() > kMaxTextBytes)
    throw UsageError(lockstep::text("TensorBoardWriter::text: the text has ", markdown.size(),
                                    " bytes, expected at most ", kMaxTextBytes, "; write a part of it"));
  file_->append(summary_event(step, ProtoMessage()
                                        .add_bytes(1, tag)
                                        .add_message(9, metadata_of_plugin("text"))
                                        .add_message(8, text_tensor(to_utf8(markdown)))));
}

void TensorBoardWriter::image(std::string_view tag, const at::Tensor& image, int64_t step) {
  check_tag(tag);
  const auto png = detail::to_png(image);
  file_->append(summary_event(step, ProtoMessage().add_bytes(1, tag).add_message(4, ProtoMessage()
                                                                                        .add_int(1, png.height)
                                                                                        .add_int(2, png.width)
                                                                                        .add_int(3, png.channels)
                                                                                        .add_bytes(4, png.bytes))));
}

void TensorBoardWriter::flush() {
  file_->sync();
}

const std::string& TensorBoardWriter::path() const {
  return file_->path();
}

}  // namespace lockstep
