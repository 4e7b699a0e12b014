#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/value.h>

// The pickles in PyTorch's files. Tensors lie outside of the pickle, in storages, which have names.

namespace lockstep::detail {

/// A value as a pickle of protocol 2, and the storages of its tensors (StoredTensors): storage "0" is storages[0].
struct Pickled {
  std::string bytes;
  std::vector<at::Tensor> storages;
};

constexpr size_t kMaxNesting = 500;    // of containers
constexpr size_t kMaxDimensions = 64;  // of a tensor: the most that LibTorch's reductions support

/// Throws UsageError for values that could not be loaded again: undefined, sparse, quantized and meta tensors, objects,
/// strings that are not UTF-8, keys that Python cannot hash, and deep nesting.
void check_can_be_saved(const Value& value);

/// Throws as check_can_be_saved() does.
Pickled write_pickle(const Value& value);

/// A storage that a pickle refers to. Sizes are as the pickle claims.
struct StorageClaim {
  std::string key;
  uint64_t bytes = 0;
  std::string device;  // on which it was saved
};

/// Returns a tensor of bytes that holds the storage, on the device on which its tensors are to be; undefined for
/// tensors without data, on the meta device.
using ReadStorage = std::function<at::Tensor(const StorageClaim& claim)>;

/// Reads pickles of Python's torch.save (protocols 2 to 5) and of LibTorch. Never calls functions that the pickle
/// names: unknown classes become values of kind object. Throws CheckpointError for anything else: unknown opcodes,
/// tensors outside of their storage, values inside themselves, and values that would take more than 160 bytes for each
/// byte of the pickle, and 1 MiB.
class PickleReader {
 public:
  /// Executes the opcodes, and computes the size of the value.
  explicit PickleReader(std::string_view bytes);
  ~PickleReader();
  PickleReader(const PickleReader&) = delete;
  PickleReader& operator=(const PickleReader&) = delete;

  /// The storages of the tensors, without repetition.
  const std::vector<StorageClaim>& storages() const;
  /// Returns the value. Calls `read` once for each storage.
  Value value(const ReadStorage& read) const;

 private:
  class Machine;
  std::unique_ptr<Machine> machine_;
};

}  // namespace lockstep::detail
