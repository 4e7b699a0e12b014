#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>

namespace lockstep {

namespace detail {
class EventFile;
}  // namespace detail

struct TensorBoardWriterOptions {
  /// For a run that is resumed: the first step that it repeats. TensorBoard then drops the records of older files in
  /// the folder from this step on. Its default loader drops a tag's records when the resumed run writes this tag again,
  /// its loader in Python (--load_fast=false) drops all of them at once. 0: drops none.
  int64_t first_step = 0;
  /// Appended to the file's name.
  std::string suffix{};
};

/// Writes an event file that TensorBoard shows, also while the program runs. Needs neither Python nor TensorFlow.
///
///     lockstep::TensorBoardWriter writer("runs/mnist");
///     writer.scalar("train/loss", loss.item<double>(), step);
///     writer.histogram("weights/fc1", model->fc1->weight, step);
///     writer.image("inputs", batch.data, step);
///
/// Then run `tensorboard --logdir runs`: each folder is a run. A tag is a name in UTF-8; TensorBoard groups tags by the
/// text before the first '/'. Use one kind of record for a tag. Records of a tag should have ascending steps:
/// TensorBoard takes a step that is not higher than the previous one for a repeated step, and drops the tag's records
/// from there on. Of a tag with many records it shows a sample, for example of 1000 scalars (--samples_per_plugin).
///
/// Not collective: construct it on one rank. Thread-safe. A forked child must not use it (UsageError).
///
/// Each call appends one whole record with one write(2), and returns when the kernel has it: nothing is lost if the
/// process is killed. histogram() and image() copy tensors of a GPU to the CPU, which blocks until they are computed.
///
/// Writing never ends a training. If it fails, for example because the disk is full, one warning is logged and records
/// are lost until writing succeeds again. Records before and after the gap stay readable. The destructor logs how many
/// were lost. Invalid arguments throw UsageError and write nothing.
class LOCKSTEP_EXPORT TensorBoardWriter {
 public:
  /// Creates the folder if it is missing, and a new file in it. Its name sorts after the names of all event files in
  /// the folder, even if clocks differ, because TensorBoard reads the files in this order. Throws SystemError if the
  /// file cannot be created, UsageError if `first_step` is negative or `suffix` contains '/'.
  explicit TensorBoardWriter(const std::string& folder, const TensorBoardWriterOptions& options = {});
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;

  /// Writes a number, which is stored as float32. NaN and infinity are allowed.
  void scalar(std::string_view tag, double value, int64_t step);

  /// Writes the distribution of all elements, with the bucket limits of Python's SummaryWriter (bins='tensorflow'):
  /// each is 10% from the next. Any real dtype, shape and device; takes no part in autograd.
  ///
  /// Only finite elements count. The number of other elements, if any, is written as the scalar "TAG/not_finite".
  /// Without finite elements, as in an empty tensor, the histogram is empty. Throws UsageError for complex, quantized
  /// and sparse tensors.
  void histogram(std::string_view tag, const at::Tensor& values, int64_t step);

  /// Writes a text, which TensorBoard renders as Markdown. Bytes that are not UTF-8 are replaced by U+FFFD. Throws
  /// UsageError for more than 64 MiB.
  void text(std::string_view tag, std::string_view markdown, int64_t step);

  /// Writes an image of shape [H, W] or [C, H, W], or a batch [N, C, H, W] as a grid with up to 8 columns and grey
  /// lines between the images. C is 1 (grey), 3 (RGB) or 4 (RGBA). uint8 from 0 to 255, or floating point from 0 to 1,
  /// which is rounded to the nearest of 256 levels; values beyond are clamped, NaN is 0. Any device. Throws UsageError
  /// for other shapes and dtypes, empty images and more than 64 MiB of pixels.
  void image(std::string_view tag, const at::Tensor& image, int64_t step);

  /// Blocks until all records are on disk (fsync), which can take long. Only a crash of the machine can lose records
  /// that were not flushed, and readers on another host may see them later.
  void flush();

  const std::string& path() const;

 private:
  const std::unique_ptr<detail::EventFile> file_;
};

}  // namespace lockstep
