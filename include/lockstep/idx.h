#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

#include <torch/data/datasets/base.h>

#include <lockstep/export.h>

namespace lockstep {

/// Reads one file in the IDX format (MNIST, Fashion-MNIST), plain or gzipped. Returns a CPU tensor with the file's type
/// (uint8, int8, int16, int32, float32 or float64) and sizes. A file without dimensions gives a scalar.
///
/// Safe for untrusted files: memory grows with the data that is read, not with sizes that a header claims. Throws
/// UsageError, which names the file, if the file is not one complete IDX file, and SystemError if it cannot be read.
LOCKSTEP_EXPORT at::Tensor read_idx(const std::filesystem::path& file);

/// Returns the directory that has the four files of a dataset, for example of "fashion-mnist". Searches
/// $LOCKSTEP_DATA/name, $LOCKSTEP_DATA and /usr/share/datasets/name (Debian's packages), in this order. Throws
/// UsageError, which lists these directories, if none has all four files.
LOCKSTEP_EXPORT std::filesystem::path find_dataset(const std::string& name);

/// Training set (train-images-idx3-ubyte, train-labels-idx1-ubyte) or test set (files named t10k-...).
enum class Split { kTrain, kTest };

/// A dataset of the MNIST family, labelled grey images, completely in memory. Copies share their tensors. Reading is
/// thread-safe, so any number of loader workers may share one dataset. Do not modify the tensors that it returns.
class LOCKSTEP_EXPORT IdxDataset : public torch::data::datasets::Dataset<IdxDataset> {
 public:
  /// Reads the images and labels of `split` from `folder`. The files may be gzipped, with the suffix .gz. Throws
  /// UsageError if a file is missing, damaged or has a different type or number of dimensions, or if the numbers of
  /// images and labels differ. Throws SystemError if a file cannot be read.
  IdxDataset(const std::filesystem::path& folder, Split split);
  ~IdxDataset() override;
  IdxDataset(const IdxDataset&) = default;
  IdxDataset& operator=(const IdxDataset&) = default;

  /// Returns the image as float32 [1, H, W] from 0 to 1 and the target as int64 scalar. Throws UsageError if `index` is
  /// out of range.
  torch::data::Example<> get(size_t index) override;

  /// Returns copies: images as float32 [n, 1, H, W] and targets as int64 [n]. Throws UsageError if an index is out of
  /// range.
  torch::data::Example<> gather(torch::ArrayRef<size_t> indices) const;

  torch::optional<size_t> size() const override;

  /// Returns all images, float32 [N, 1, H, W] from 0 to 1.
  const at::Tensor& images() const;

  /// Returns all labels, int64 [N].
  const at::Tensor& targets() const;

 private:
  void check_index(size_t index) const;

  // Constant after construction.
  at::Tensor images_;
  at::Tensor targets_;
};

}  // namespace lockstep
