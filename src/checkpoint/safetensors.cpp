#include "checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "base/text.h"
#include "checkpoint/pickle.h"

namespace lockstep {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

constexpr std::pair<at::ScalarType, const char*> kTypes[] = {
    {at::kBool, "BOOL"}, {at::kByte, "U8"},  {at::kChar, "I8"},       {at::kShort, "I16"}, {at::kInt, "I32"},
    {at::kLong, "I64"},  {at::kHalf, "F16"}, {at::kBFloat16, "BF16"}, {at::kFloat, "F32"}, {at::kDouble, "F64"}};

constexpr size_t kPrefixBytes = 8;            // hold the length of the header
constexpr size_t kAlignment = 8;              // of the tensors; spaces pad the header
constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the format's own library
constexpr int kHeaderLevels = 3;              // of objects and lists: shapes, in a tensor's entry
constexpr const char* kMetadata = "__metadata__";

template <class... Parts>
[[noreturn]] void refuse_file(const Parts&... parts) {
  throw CheckpointError(text("not valid safetensors data: ", parts...));
}

const char* dtype_name(at::ScalarType type) {
  for (const auto& [known, name] : kTypes)
    if (known == type) return name;
  throw UsageError(text("safetensors has no dtype for tensors of ", type, "; convert them first"));
}

at::ScalarType type_named(const std::string& name, const std::string& tensor) {
  for (const auto& [type, known] : kTypes)
    if (name == known) return type;
  refuse_file("tensor '", tensor, "' is of type '", name, "', which lockstep does not support");
}

std::vector<int64_t> integer_list(const json& entry) {
  if (entry.size() > detail::kMaxDimensions)
    throw std::invalid_argument(
        text("it has a list of ", entry.size(), " numbers, expected ", detail::kMaxDimensions, " dimensions or fewer"));
  std::vector<int64_t> numbers;
  for (const auto& number : entry) {
    if (!number.is_number_unsigned()) throw std::invalid_argument(number.dump() + " is not an integer of 0 or more");
    numbers.push_back(number.get<int64_t>());
  }
  return numbers;
}

// Returns the size of a tensor of this shape. Extents of an empty tensor are checked for overflow as well, because
// LibTorch would fail on them.
size_t tensor_bytes(const std::vector<int64_t>& shape, size_t element_bytes, size_t limit, const std::string& name) {
  constexpr auto kMost = static_cast<size_t>(std::numeric_limits<int64_t>::max());
  const bool is_empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  size_t bytes = element_bytes;
  for (int64_t extent : shape) {
    if (extent < 0 || static_cast<size_t>(extent) > kMost / bytes)
      refuse_file("tensor '", name, "' has an extent of ", extent);
    if (extent > 0) bytes *= static_cast<size_t>(extent);
  }
  if (is_empty) return 0;
  if (bytes > limit) refuse_file("tensor '", name, "' claims ", bytes, " bytes, but there are only ", limit);
  return bytes;
}

struct TensorEntry {
  std::string name;
  at::ScalarType type;
  std::vector<int64_t> shape;
  size_t begin;
  size_t end;
};

TensorEntry read_entry(const std::string& name, const json& entry, size_t data_bytes) {
  try {
    const auto type = type_named(entry.at("dtype").get<std::string>(), name);
    const auto offsets = integer_list(entry.at("data_offsets"));
    TensorEntry place{name, type, integer_list(entry.at("shape")), static_cast<size_t>(offsets.at(0)),
                      static_cast<size_t>(offsets.at(1))};
    const size_t expected = tensor_bytes(place.shape, c10::elementSize(type), data_bytes, name);
    if (offsets.size() != 2 || place.begin > place.end || place.end > data_bytes || place.end - place.begin != expected)
      refuse_file("tensor '", name, "' of ", expected, " bytes has data_offsets ", entry.at("data_offsets").dump(),
                  " in ", data_bytes, " bytes of data");
    return place;
  } catch (const json::exception& error) {
    refuse_file("tensor '", name, "': ", error.what());
  } catch (const std::out_of_range&) {
    refuse_file("tensor '", name, "' has fewer than two data_offsets");
  } catch (const std::invalid_argument& error) {
    refuse_file("tensor '", name, "': ", error.what());
  }
}

// Returns the tensors in the order of their data, which must have no gaps and no overlaps.
std::vector<TensorEntry> parse_header(std::string_view header, size_t data_bytes) {
  std::vector<TensorEntry> places;
  json parsed;
  // Without a callback of the parser, which takes quadratic time.
  if (detail::is_json_deeper_than(kHeaderLevels, header))
    refuse_file("the header cannot be read: expected ", kHeaderLevels, " levels of objects and lists, or fewer");
  try {
    parsed = json::parse(header);
  } catch (const json::exception& error) {
    refuse_file("the header cannot be read: ", error.what());
  }
  if (!parsed.is_object()) refuse_file("the header is not a JSON object");
  for (const auto& [name, entry] : parsed.items())
    if (name != kMetadata) places.push_back(read_entry(name, entry, data_bytes));
  std::sort(places.begin(), places.end(), [](const TensorEntry& one, const TensorEntry& other) {
    return std::pair(one.begin, one.end) < std::pair(other.begin, other.end);
  });
  size_t next = 0;
  for (const auto& place : places) {
    if (place.begin != next) refuse_file("tensor '", place.name, "' begins at ", place.begin, ", expected ", next);
    next = place.end;
  }
  if (next != data_bytes) refuse_file("the tensors end at byte ", next, ", expected ", data_bytes);
  return places;
}

}  // namespace

void detail::write_safetensors(ByteSink& sink, const std::map<std::string, at::Tensor>& tensors) {
  std::string header = "{";
  size_t data_bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined()) throw UsageError(text("to_safetensors: '", name, "' is undefined; leave it out"));
    if (name == kMetadata)
      throw UsageError(text("to_safetensors: the name ", kMetadata, " is reserved; rename the tensor"));
    const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
    const ordered_json entry = {{"dtype", dtype_name(tensor.scalar_type())},
                                {"shape", tensor.sizes().vec()},
                                {"data_offsets", {data_bytes, data_bytes + bytes}}};
    try {
      header += text(header.size() > 1 ? "," : "", json(name).dump(), ":", entry.dump());
    } catch (const json::exception& error) {
      throw UsageError(text("to_safetensors: a name is not UTF-8: ", error.what()));
    }
    if (header.size() + kAlignment > kMaxHeader)
      throw UsageError(text("to_safetensors: the names and shapes of the tensors up to '", name.substr(0, 80),
                            "' take more than ", kMaxHeader, " bytes, the limit of the format; write several files"));
    data_bytes += bytes;
  }
  header += '}';
  header.resize((header.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');

  const uint64_t length = header.size();
  sink.reserve(kPrefixBytes + length + data_bytes);
  sink.write_at(0, &length, kPrefixBytes);
  sink.write_at(kPrefixBytes, header.data(), length);
  uint64_t next = kPrefixBytes + length;
  for (const auto& [name, tensor] : tensors) {  // one copy at a time
    const auto part = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg();
    sink.write_at(next, part.data_ptr(), part.nbytes());
    next += part.nbytes();
  }
}

std::string to_safetensors(const std::map<std::string, at::Tensor>& tensors) {
  detail::MemorySink sink;
  detail::write_safetensors(sink, tensors);
  return sink.take();
}

bool detail::looks_like_safetensors(const ByteSource& source) {
  if (source.size() <= kPrefixBytes) return false;
  uint64_t length = 0;
  source.read(0, &length, kPrefixBytes);
  return length <= source.size() - kPrefixBytes && source.read(kPrefixBytes, 1) == "{";
}

std::map<std::string, at::Tensor> detail::read_safetensors(const ByteSource& source, c10::Device device) {
  if (source.size() < kPrefixBytes) refuse_file("got ", source.size(), " bytes, expected ", kPrefixBytes, " or more");
  uint64_t length = 0;
  source.read(0, &length, kPrefixBytes);
  const uint64_t rest = source.size() - kPrefixBytes;
  if (length > rest) refuse_file("the header claims ", length, " bytes, but there are only ", rest);
  if (length > kMaxHeader) refuse_file("the header has ", length, " bytes, expected ", kMaxHeader, " or fewer");
  std::map<std::string, at::Tensor> tensors;
  for (const auto& place : parse_header(source.read(kPrefixBytes, length), rest - length)) {
    const auto options = at::TensorOptions(place.type);
    if (device.is_meta()) {
      tensors.emplace(place.name, at::empty(place.shape, options.device(device)));
      continue;
    }
    auto tensor = at::empty(place.shape, options);
    source.read(kPrefixBytes + length + place.begin, tensor.data_ptr(), place.end - place.begin);
    tensors.emplace(place.name, tensor.to(device));
  }
  return tensors;
}

std::map<std::string, at::Tensor> from_safetensors(std::string_view bytes) {
  try {
    return detail::read_safetensors(detail::MemorySource(bytes), c10::kCPU);
  } catch (const CheckpointError& error) {
    throw UsageError(error.what());
  }
}

}  // namespace lockstep
