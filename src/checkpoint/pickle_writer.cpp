#include <bit>
#include <cstring>
#include <limits>
#include <map>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "checkpoint/pickle.h"
#include "checkpoint/stored_tensors.h"

namespace lockstep::detail {
namespace {

using Kind = Value::Kind;

/// The class of typed storages of a dtype in Python; empty for newer dtypes, which have untyped storages.
std::string storage_class(at::ScalarType dtype) {
  using at::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::Long:
    case ScalarType::Int:
    case ScalarType::Short:
    case ScalarType::Char:
    case ScalarType::Byte:
    case ScalarType::Bool:
    case ScalarType::ComplexFloat:
    case ScalarType::ComplexDouble:
      return text(c10::toString(dtype), "Storage");
    default:
      return {};
  }
}

class Writer {
 public:
  Writer(std::vector<StoredTensor> tensors, const std::vector<at::Tensor>& storages)
      : tensors_(std::move(tensors)), storages_(storages) {
    bytes_ = "\x80\x02";  // protocol 2
  }

  std::string finish(const Value& value) && {
    write(value);
    bytes_ += '.';
    return std::move(bytes_);
  }

 private:
  void write(const Value& value) {
    switch (value.kind()) {
      case Kind::kNone:
        bytes_ += 'N';
        break;
      case Kind::kBool:
        write_bool(value.as_bool());
        break;
      case Kind::kInt:
        write_int(value.as_int());
        break;
      case Kind::kBigInt:
        write_long(value.digits());
        break;
      case Kind::kFloat:
        write_float(value.as_double());
        break;
      case Kind::kString:
        write_string(value.as_string());
        break;
      case Kind::kBytes:
        write_bytes(value.as_string());
        break;
      case Kind::kTensor:
        write_tensor(tensors_[next_tensor_++]);
        break;
      case Kind::kDtype:
        write_global("torch", python_name(value.dtype()));
        break;
      case Kind::kDevice:
        write_device(value.device());
        break;
      case Kind::kList:
        write_list(value.elements());
        break;
      case Kind::kTuple:
        bytes_ += '(';
        for (const auto& element : value.elements()) write(element);
        bytes_ += 't';
        break;
      case Kind::kSet:
        write_global("__builtin__", "set");
        bytes_ += '(';
        write_list(value.elements());
        bytes_ += "tR";
        break;
      case Kind::kDict:
        bytes_ += '}';
        if (value.size() == 0) break;
        bytes_ += '(';
        for (const auto& [key, item] : value.items()) {
          write(key);
          write(item);
        }
        bytes_ += 'u';
        break;
      case Kind::kObject:
        break;  // refused before
    }
  }

  template <class T>
  void put(T number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  void write_bool(bool value) { bytes_ += value ? '\x88' : '\x89'; }

  void write_int(int64_t number) {
    if (number >= 0 && number <= 0xff) {
      bytes_ += 'K';
      put(static_cast<uint8_t>(number));
    } else if (number >= 0 && number <= 0xffff) {
      bytes_ += 'M';
      put(static_cast<uint16_t>(number));
    } else if (number >= std::numeric_limits<int32_t>::min() && number <= std::numeric_limits<int32_t>::max()) {
      bytes_ += 'J';
      put(static_cast<int32_t>(number));
    } else {
      write_long(std::string(reinterpret_cast<const char*>(&number), sizeof(number)));
    }
  }

  void write_long(const std::string& digits) {
    if (digits.size() <= 0xff) {
      bytes_ += '\x8a';
      put(static_cast<uint8_t>(digits.size()));
    } else {
      bytes_ += '\x8b';
      put(static_cast<int32_t>(digits.size()));
    }
    bytes_ += digits;
  }

  void write_float(double number) {
    bytes_ += 'G';  // the only number in a pickle with the most significant byte first
    auto bits = std::bit_cast<uint64_t>(number);
    for (int shift = 56; shift >= 0; shift -= 8) bytes_ += static_cast<char>(bits >> shift);
  }

  /// Writes bytes that occur several times only once: later occurrences refer to the first.
  template <class Write>
  void remember(const std::string& key, const Write& write_first) {
    const auto [found, is_new] = memo_.emplace(key, static_cast<uint32_t>(memo_.size()));
    const uint32_t place = found->second;
    if (is_new) write_first();
    const bool is_short = place <= 0xff;
    bytes_ += is_new ? (is_short ? 'q' : 'r') : (is_short ? 'h' : 'j');
    if (is_short)
      put(static_cast<uint8_t>(place));
    else
      put(place);
  }

  void write_string(const std::string& content) {
    if (content.size() > std::numeric_limits<uint32_t>::max())
      throw UsageError("a checkpoint cannot hold a string of 4 GiB or more; store a tensor of bytes");
    const auto write_out = [&] {
      bytes_ += 'X';
      put(static_cast<uint32_t>(content.size()));
      bytes_ += content;
    };
    constexpr size_t kMaxRepeated = 200;  // readers refuse pickles that grow too much
    if (content.size() > kMaxRepeated)
      write_out();
    else
      remember("s" + content, write_out);
  }

  void write_global(const std::string& module, const std::string& name) {
    const auto line = text("c", module, "\n", name, "\n");
    remember(line, [&] { bytes_ += line; });
  }

  /// Protocol 2 has no bytes: they are written as Python does it, as text in latin1.
  void write_bytes(const std::string& content) {
    std::string utf8;
    for (char c : content) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x80) {
        utf8 += c;
      } else {
        utf8 += static_cast<char>(0xc0 | (byte >> 6));
        utf8 += static_cast<char>(0x80 | (byte & 0x3f));
      }
    }
    write_global("_codecs", "encode");
    bytes_ += '(';
    write_string(utf8);
    write_string("latin1");
    bytes_ += "tR";
  }

  void write_list(const std::vector<Value>& elements) {
    bytes_ += ']';
    if (elements.empty()) return;
    bytes_ += '(';
    for (const auto& element : elements) write(element);
    bytes_ += 'e';
  }

  void write_device(const c10::Device& device) {
    write_global("torch", "device");
    bytes_ += '(';
    write_string(c10::DeviceTypeName(device.type(), /*lower_case=*/true));
    if (device.has_index()) write_int(device.index());
    bytes_ += "tR";
  }

  void write_sizes(at::IntArrayRef sizes) {
    bytes_ += '(';
    for (int64_t size : sizes) write_int(size);
    bytes_ += 't';
  }

  void write_tensor(const StoredTensor& placed) {
    const auto dtype = placed.tensor.scalar_type();
    const auto type = storage_class(dtype);
    const bool is_typed = !type.empty();
    const auto& storage = storages_[placed.storage];
    write_global("torch._utils", is_typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    bytes_ += "((";
    write_string("storage");
    if (is_typed)
      write_global("torch", type);
    else
      write_global("torch.storage", "UntypedStorage");
    write_string(std::to_string(placed.storage));
    write_string("cpu");  // so that every machine can load it
    write_int(is_typed ? storage.numel() : static_cast<int64_t>(storage.nbytes()));
    bytes_ += "tQ";
    write_int(placed.offset);
    write_sizes(placed.tensor.sizes());
    write_sizes(placed.tensor.strides());
    write_bool(false);  // requires_grad
    write_global("collections", "OrderedDict");
    bytes_ += ")R";  // no hooks
    if (!is_typed) write_global("torch", python_name(dtype));
    bytes_ += "tR";
  }

  const std::vector<StoredTensor> tensors_;  // in the order of the value
  const std::vector<at::Tensor>& storages_;
  size_t next_tensor_ = 0;
  std::map<std::string, uint32_t> memo_;
  std::string bytes_;
};

}  // namespace

Pickled write_pickle(const Value& value) {
  check_can_be_saved(value);
  auto stored = store_tensors(value);
  Pickled result{{}, std::move(stored.storages)};
  result.bytes = Writer(std::move(stored.tensors), result.storages).finish(value);
  return result;
}

}  // namespace lockstep::detail
