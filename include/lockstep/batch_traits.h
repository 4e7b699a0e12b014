#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>

namespace lockstep {

class BatchReader;
class BatchWriter;

/// How batches of type T are sent to other ranks (GroupLoader). Defined for
///   - tensors, defined or not, and LibTorch's Examples,
///   - numbers, booleans, enumerations and strings,
///   - pairs, tuples, vectors, arrays, optionals and maps of these,
///   - structs that can be default-constructed and whose function tensors() lists all their members (see TensorsIn),
///     for example PaddedBatch.
/// Specialize it for other types, for example for a struct with more members than tensors() lists:
///
///     template <>
///     struct lockstep::BatchTraits<Sentences> {
///       static void write(lockstep::BatchWriter& to, const Sentences& batch) {
///         to.write(batch.tokens);
///         to.write(batch.texts);                                       // a vector of strings
///       }
///       static Sentences read(lockstep::BatchReader& from) {
///         auto tokens = from.read<torch::Tensor>();                    // in the same order
///         return {tokens, from.read<std::vector<std::string>>()};
///       }
///     };
///
/// write() is called on worker threads of the rank that reads, read() on the thread of the loop. Either may throw.
template <class T>
struct BatchTraits;

/// A type for which BatchTraits is defined.
template <class T>
concept Sendable = requires(BatchWriter& to, BatchReader& from, const T& batch) {
  BatchTraits<T>::write(to, batch);
  { BatchTraits<T>::read(from) } -> std::same_as<T>;
};

/// Serializes the items of a batch. Not thread-safe.
class LOCKSTEP_EXPORT BatchWriter {
 public:
  template <Sendable T>
  void write(const T& item) {
    BatchTraits<T>::write(*this, item);
  }

  /// The basic items, from which BatchTraits builds all other items. Tensors are copied to the CPU and become
  /// contiguous; channels_last stays. Throws UsageError for tensors that are not dense.
  void write_tensor(const at::Tensor& tensor);
  void write_string(std::string_view string);
  void write_number(const void* number, size_t bytes);
  void write_count(size_t count);  // number of items that follow

  /// Returns the bytes of all items.
  std::string take() const;

 private:
  void write_size(size_t size);

  std::string items_{};
  std::vector<at::Tensor> tensors_{};  // their data follows the items, so that it is copied once
};

/// Reads items in the order in which a BatchWriter has written them. `bytes` must outlive it. Throws MismatchError if
/// the next item is of another kind. Not thread-safe.
class LOCKSTEP_EXPORT BatchReader {
 public:
  explicit BatchReader(std::string_view bytes);

  template <Sendable T>
  T read() {
    return BatchTraits<T>::read(*this);
  }

  at::Tensor read_tensor();
  std::string read_string();
  void read_number(void* number, size_t bytes);
  size_t read_count();
  /// Throws MismatchError if not all items were read.
  void finish() const;

 private:
  size_t read_size();

  std::string_view items_;
  std::string_view data_{};  // of the tensors that follow
};

}  // namespace lockstep

#include <lockstep/detail/batch_traits_inl.h>
