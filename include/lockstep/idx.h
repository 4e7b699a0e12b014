#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include <torch/data/datasets/base.h>

#include <lockstep/export.h>

namespace lockstep {

/// Reads one file in the IDX format (MNIST, Fashion-MNIST), plain or gzipped. The tensor is on the CPU, of the file's
/// type (uint8, int8, int16, int32, float32 or float64) and of its extents; no extents give a scalar.
///
/// Files may be hostile: memory grows with the data that arrives, never with what a header claims. Throws UsageError,
/// which names the file, for anything that is not one whole IDX file, and SystemError where it cannot be read.
LOCKSTEP_EXPORT at::Tensor read_idx(const std::filesystem::path& file);

/// Where the four files of a dataset are: $LOCKSTEP_DATA/name, else $LOCKSTEP_DATA, else /usr/share/datasets/name
/// (Debian's packages). `name` is for instance "fashion-mnist". Throws UsageError listing these if none has them all.
LOCKSTEP_EXPORT std::filesystem::path find_dataset(const std::string& name);

/// Which half of a dataset: train-images-idx3-ubyte and train-labels-idx1-ubyte, or those named t10k.
enum class Split { kTrain, kTest };

/// Labelled grey images of the MNIST family, wholly in memory. Copies share their tensors and reading is thread-safe,
/// so any number of loader workers may use one; do not write into the tensors it returns.
class LOCKSTEP_EXPORT IdxDataset : public torch::data::datasets::Dataset<IdxDataset> {
 public:
  /// Reads the images and labels of `split` in `folder`; either may be gzipped and end in .gz. Throws UsageError if a
  /// file is absent, damaged or of another type or rank, or if there are more images than labels or the reverse.
  IdxDataset(const std::filesystem::path& folder, Split split);
  ~IdxDataset() override;
  IdxDataset(const IdxDataset&) = default;
  IdxDataset& operator=(const IdxDataset&) = default;

  /// Image float32 [1, H, W] from 0 to 1, target int64 scalar. Throws UsageError for an index past the end.
  torch::data::Example<> get(size_t index) override;

  /// Images float32 [n, 1, H, W] and targets int64 [n], copied. Throws UsageError for an index past the end.
  torch::data::Example<> gather(torch::ArrayRef<size_t> indices) const;

  torch::optional<size_t> size() const override;

  /// All images, float32 [N, 1, H, W] from 0 to 1.
  const at::Tensor& images() const;

  /// All labels, int64 [N].
  const at::Tensor& targets() const;

 private:
  void check_index(size_t index) const;

  // Constant after construction.
  at::Tensor images_;
  at::Tensor targets_;
};

}  // namespace lockstep
