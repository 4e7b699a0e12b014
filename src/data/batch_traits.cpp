#include <lockstep/batch_traits.h>

#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

// The format: the number of bytes of the items, the items, the data of the tensors. An item begins with its kind (one
// byte). Numbers are in the byte order of the machine. A tensor is its dtype, memory format and sizes; an undefined
// tensor has kUndefined as its dtype. A rank whose batches have a different type finds a different kind of item.

namespace lockstep {
namespace {

enum class ItemKind : char { kTensor = 'T', kString = 'S', kNumber = 'N', kCount = 'C' };

constexpr uint64_t kUndefined = 255;

const char* name_of_item(char kind) {
  switch (static_cast<ItemKind>(kind)) {
    case ItemKind::kTensor:
      return "a tensor";
    case ItemKind::kString:
      return "a string";
    case ItemKind::kNumber:
      return "a number";
    case ItemKind::kCount:
      return "a container";
  }
  return "an unknown item";
}

[[noreturn]] void refuse_batch(const std::string& expected, const std::string& found) {
  throw MismatchError(text("the batch cannot be unpacked: expected ", expected, ", found ", found,
                           "; use the same type of batch on all ranks"));
}

std::string_view take_front(std::string_view& bytes, size_t count, const char* what) {
  if (count > bytes.size()) refuse_batch(what, "the end of the batch");
  const auto taken = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return taken;
}

void read_kind(std::string_view& items, ItemKind expected) {
  const char* const name = name_of_item(static_cast<char>(expected));
  const char found = take_front(items, 1, name)[0];
  if (found != static_cast<char>(expected)) refuse_batch(name, name_of_item(found));
}

}  // namespace

void BatchWriter::write_size(size_t size) {
  const uint64_t number = size;
  items_.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void BatchWriter::write_tensor(const at::Tensor& tensor) {
  items_ += static_cast<char>(ItemKind::kTensor);
  if (!tensor.defined()) return write_size(kUndefined);
  if (tensor.layout() != c10::kStrided || tensor.is_quantized())
    throw UsageError(text("a batch has a tensor of ", tensor.scalar_type(), " with layout ", tensor.layout(),
                          ", which cannot be sent; convert it to a dense tensor"));
  const auto format = tensor.suggest_memory_format();
  const auto& sent = tensors_.emplace_back(tensor.detach().cpu().contiguous(format).resolve_conj().resolve_neg());
  write_size(static_cast<size_t>(sent.scalar_type()));
  write_size(static_cast<size_t>(format));
  write_size(static_cast<size_t>(sent.dim()));
  for (const int64_t size : sent.sizes()) write_size(static_cast<size_t>(size));
}

void BatchWriter::write_string(std::string_view string) {
  items_ += static_cast<char>(ItemKind::kString);
  write_size(string.size());
  items_ += string;
}

void BatchWriter::write_number(const void* number, size_t bytes) {
  items_ += static_cast<char>(ItemKind::kNumber);
  items_ += static_cast<char>(bytes);
  items_.append(static_cast<const char*>(number), bytes);
}

void BatchWriter::write_count(size_t count) {
  items_ += static_cast<char>(ItemKind::kCount);
  write_size(count);
}

std::string BatchWriter::take() const {
  const uint64_t items = items_.size();
  size_t bytes = sizeof items + items_.size();
  for (const auto& tensor : tensors_) bytes += tensor.nbytes();
  std::string all;
  all.reserve(bytes);
  all.append(reinterpret_cast<const char*>(&items), sizeof items);
  all += items_;
  for (const auto& tensor : tensors_) all.append(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
  return all;
}

BatchReader::BatchReader(std::string_view bytes) : items_(bytes) {
  const auto items = read_size();
  data_ = items_;
  items_ = take_front(data_, items, "items");
}

size_t BatchReader::read_size() {
  uint64_t size = 0;
  std::memcpy(&size, take_front(items_, sizeof size, "a size").data(), sizeof size);
  return size;
}

at::Tensor BatchReader::read_tensor() {
  read_kind(items_, ItemKind::kTensor);
  const auto dtype = read_size();
  if (dtype == kUndefined) return {};
  const auto scalar_type = static_cast<at::ScalarType>(dtype);
  const auto format = static_cast<at::MemoryFormat>(read_size());
  std::vector<int64_t> sizes;
  size_t bytes = c10::elementSize(scalar_type);
  for (size_t left = read_size(); left > 0; --left) {
    sizes.push_back(static_cast<int64_t>(read_size()));
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(sizes.back()), &bytes)) refuse_batch("a tensor", "its size");
  }
  const auto data = take_front(data_, bytes, "the data of a tensor");
  auto tensor = at::empty(sizes, at::TensorOptions(scalar_type), format);
  if (!data.empty()) std::memcpy(tensor.data_ptr(), data.data(), data.size());
  return tensor;
}

std::string BatchReader::read_string() {
  read_kind(items_, ItemKind::kString);
  const auto bytes = read_size();
  return std::string(take_front(items_, bytes, "a string"));
}

void BatchReader::read_number(void* number, size_t bytes) {
  read_kind(items_, ItemKind::kNumber);
  const auto found = static_cast<unsigned char>(take_front(items_, 1, "a number")[0]);
  if (found != bytes) refuse_batch(text("a number of ", bytes, " bytes"), text("one of ", int{found}));
  std::memcpy(number, take_front(items_, bytes, "a number").data(), bytes);
}

size_t BatchReader::read_count() {
  read_kind(items_, ItemKind::kCount);
  return read_size();
}

void BatchReader::finish() const {
  if (!items_.empty()) refuse_batch("the end of the batch", name_of_item(items_.front()));
  if (!data_.empty()) refuse_batch("the end of the batch", text(data_.size(), " bytes"));
}

}  // namespace lockstep
