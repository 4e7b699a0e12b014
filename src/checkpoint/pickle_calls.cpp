#include <algorithm>
#include <cstring>
#include <limits>

#include <ATen/ATen.h>

#include "checkpoint/pickle_nodes.h"

namespace lockstep::detail {
namespace {

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string from_latin1(std::string_view utf8) {
  std::string bytes;
  for (size_t i = 0; i < utf8.size(); ++i) {
    const auto byte = static_cast<unsigned char>(utf8[i]);
    if (byte < 0x80) {
      bytes += utf8[i];
    } else if ((byte == 0xc2 || byte == 0xc3) && i + 1 < utf8.size()) {
      bytes += static_cast<char>(((byte & 3) << 6) | (utf8[++i] & 0x3f));
    } else {
      refuse_pickle("bytes are not in latin1");
    }
  }
  return bytes;
}

/// NumPy's name of a type without the byte order ("f8", "i4"), as a dtype.
std::optional<at::ScalarType> numpy_dtype(std::string_view code) {
  static constexpr std::pair<const char*, at::ScalarType> kTypes[] = {
      {"f8", at::kDouble}, {"f4", at::kFloat}, {"f2", at::kHalf}, {"i8", at::kLong}, {"i4", at::kInt},
      {"i2", at::kShort},  {"i1", at::kChar},  {"u1", at::kByte}, {"b1", at::kBool}};
  for (const auto& [name, dtype] : kTypes)
    if (code == name) return dtype;
  return std::nullopt;
}

/// A NumPy type without a dtype in LibTorch of all versions: unsigned integers keep their bits.
std::optional<at::ScalarType> dtype_of_bits(std::string_view code) {
  if (code == "u4") return at::kInt;
  if (code == "u8") return at::kLong;
  if (code == "u2") return at::kShort;
  return numpy_dtype(code);
}

int64_t checked_product(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) refuse_pickle("a tensor has more than 2^63 elements");
  return product;
}

int64_t checked_sum(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) refuse_pickle("a tensor has more than 2^63 elements");
  return sum;
}

[[noreturn]] std::vector<Node>& refuse_target(const char* what) {
  refuse_pickle("it adds ", what, " to a value that has none");
}

/// A device by its type, and its index in the name ("cuda:1") or beside it. None if this LibTorch does not have it.
/// Without c10::Device's own parser: its exceptions take a millisecond each.
std::optional<c10::Device> device_named(std::string_view name, std::optional<int64_t> index) {
  if (const auto colon = name.find(':'); colon != std::string_view::npos) {
    if (index) return std::nullopt;
    index = parse_number<int64_t>(name.substr(colon + 1));
    if (!index) return std::nullopt;
    name = name.substr(0, colon);
  }
  for (int i = 0; i < static_cast<int>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES); ++i) {
    const auto type = static_cast<c10::DeviceType>(i);
    if (name != c10::DeviceTypeName(type, /*lower_case=*/true)) continue;
    const int64_t most = type == at::kCPU ? 0 : std::numeric_limits<c10::DeviceIndex>::max();
    if (index && (*index < 0 || *index > most)) return std::nullopt;
    return index ? c10::Device(type, static_cast<c10::DeviceIndex>(*index)) : c10::Device(type);
  }
  return std::nullopt;
}

/// "torch.FloatStorage", or "torch.storage.TypedStorage" of a dtype.
std::optional<at::ScalarType> storage_dtype(std::string_view type) {
  constexpr std::string_view kModule = "torch.", kEnd = "Storage";
  if (!type.starts_with(kModule) || !type.ends_with(kEnd)) return std::nullopt;
  type.remove_prefix(kModule.size());
  type.remove_suffix(kEnd.size());
  for (int i = 0; i < static_cast<int>(at::ScalarType::Undefined); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    if (type == c10::toString(dtype) && !c10::isQIntType(dtype)) return dtype;
  }
  return std::nullopt;
}

void check_inside(const TensorEntry& tensor, uint64_t bytes) {
  if (tensor.sizes.size() > kMaxDimensions)
    refuse_pickle("a tensor has ", tensor.sizes.size(), " dimensions, expected ", kMaxDimensions, " or fewer");
  if (tensor.sizes.size() != tensor.strides.size())
    refuse_pickle("a tensor has ", tensor.sizes.size(), " sizes and ", tensor.strides.size(), " strides");
  if (tensor.offset < 0) refuse_pickle("a tensor begins at element ", tensor.offset);
  const auto item = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  int64_t elements = item, last = tensor.offset;
  bool is_empty = false;
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] < 0 || tensor.strides[d] < 0)
      refuse_pickle("a tensor has size ", tensor.sizes[d], " and stride ", tensor.strides[d]);
    is_empty |= tensor.sizes[d] == 0;
    elements = checked_product(elements, std::max<int64_t>(1, tensor.sizes[d]));
    last = checked_sum(last, checked_product(std::max<int64_t>(1, tensor.sizes[d]) - 1, tensor.strides[d]));
  }
  const auto end = static_cast<uint64_t>(checked_product(checked_sum(last, is_empty ? 0 : 1), item));
  if (!is_empty && end > bytes)
    refuse_pickle("a tensor of sizes ", at::IntArrayRef(tensor.sizes), " ends at byte ", end, " of a storage of ",
                  bytes, " bytes");
}

}  // namespace

void PickleCalls::add_elements(Node target, const std::vector<Node>& items) {
  auto& list = is(target, NodeKind::kObject)                               ? entry(target).arguments
               : is(target, NodeKind::kList) || is(target, NodeKind::kSet) ? elements(target)
                                                                           : refuse_target("elements");
  spend(items.size() * sizeof(Node));
  list.insert(list.end(), items.begin(), items.end());
}

void PickleCalls::add_items(Node target, const std::vector<Node>& items) {
  if (items.size() % 2 != 0) refuse_pickle("a key has no value");
  auto& list = is(target, NodeKind::kObject) ? entry(target).entries
               : is(target, NodeKind::kDict) ? elements(target)
                                             : refuse_target("items");
  spend(items.size() * sizeof(Node));
  list.insert(list.end(), items.begin(), items.end());
}

/// Returns the result that the function or class of this name would return for the arguments.
Node PickleCalls::call(const std::string& function, Node arguments) {
  const auto& list = tuple(arguments, 0);
  spend((list.size() + 1) * sizeof(Node));
  const auto is_a = [&](std::initializer_list<std::string_view> names) { return is_one_of(function, names); };
  if (is_a({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v3"}))
    return tensor(function, list);
  if (is_a({"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
            "torch.nn.parameter.Parameter", "torch.jit._pickle.restore_type_tag"}) ||
      is_a({"torch.jit._pickle.build_intlist", "torch.jit._pickle.build_doublelist", "torch.jit._pickle.build_boollist",
            "torch.jit._pickle.build_tensorlist"}))
    return tuple(arguments, 1)[0];
  if (function == "torch._tensor._rebuild_from_type_v2") {
    const auto& parts = tuple(arguments, 3);
    if (name(parts[0]) == function) refuse_pickle("a tensor is built from itself");
    return call(name(parts[0]), parts[2]);
  }
  if (function.starts_with("torch._utils._rebuild_") || function.starts_with("torch.jit._pickle."))
    refuse_pickle("it has a tensor that only ", function, " can build, such as a sparse or quantized one; save a ",
                  "dense tensor instead");
  if (is_a({"collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict",
            "__builtin__.dict"}))
    return dict_from(list);
  if (is_a({"builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset"}))
    return sequence(NodeKind::kSet, list.empty() ? std::vector<Node>() : listed(list[0]));
  if (function == "torch.Size") return sequence(NodeKind::kTuple, listed(tuple(arguments, 1)[0]));
  if (function == "torch.device") return device(list);
  if (is_a({"_codecs.encode", "builtins.bytearray", "__builtin__.bytearray", "builtins.bytes", "__builtin__.bytes"}))
    return leaf(Value::bytes(list.empty() ? std::string() : encoded(list[0])));
  if (is_a({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})) return numpy_scalar(arguments);
  if (is_a({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}))
    return object(joined_name("numpy", "ndarray"), {});
  if (is_a({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})) {
    const auto& parts = tuple(arguments, 4);
    return numpy_array(parts[2], parts[1], string(parts[3]) == "F", parts[0]);
  }
  if (is_a({"builtins.getattr", "__builtin__.getattr"})) {  // a member of an enumeration
    const auto& parts = tuple(arguments, 2);
    return object(joined_name(name(parts[0]), string(parts[1])), {});
  }
  if (function == "copyreg._reconstructor") return object(name(tuple(arguments, 1)[0]), {});
  return object(function, list);
}

const std::vector<Node>& PickleCalls::listed(Node node) const {
  if (!is_sequence(node)) refuse_pickle("expected a list or tuple");
  return elements(node);
}

std::string PickleCalls::encoded(Node node) const {
  const auto& content = string(node);
  return value(node).is(Value::Kind::kBytes) ? content : from_latin1(content);
}

/// Arguments are a list of pairs, a dict, or the factory of a defaultdict.
Node PickleCalls::dict_from(const std::vector<Node>& arguments) {
  std::vector<Node> items;
  for (Node argument : arguments) {
    if (is(argument, NodeKind::kDict)) {
      spend(elements(argument).size() * sizeof(Node));
      items = elements(argument);
    }
    if (!is(argument, NodeKind::kList)) continue;
    for (Node pair : elements(argument)) {
      const auto& both = listed(pair);
      if (both.size() != 2) refuse_pickle("an item of a dict is not a pair");
      spend(both.size() * sizeof(Node));
      items.insert(items.end(), both.begin(), both.end());
    }
  }
  return sequence(NodeKind::kDict, std::move(items));
}

Node PickleCalls::device(const std::vector<Node>& arguments) {
  if (arguments.size() != 1 && arguments.size() != 2) refuse_pickle("a device has ", arguments.size(), " arguments");
  const auto& written = string(arguments[0]);
  std::optional<int64_t> index;
  if (arguments.size() == 2) index = integer(arguments[1]);
  if (const auto known = device_named(written, index)) return leaf(*known);
  return leaf(written);  // a device that this LibTorch does not have, as text
}

/// Persistent ids are storages: ("storage", type, key, device, number of elements).
Node PickleCalls::storage(Node id) {
  const auto& parts = tuple(id, 5);
  if (string(parts[0]) != "storage") refuse_pickle("it refers to an external '", string(parts[0]), "'");
  StorageEntry entry{0, std::nullopt, integer(parts[4])};
  const auto& type = name(parts[1]);
  if (type != "torch.storage.UntypedStorage" && type != "torch.UntypedStorage") {
    entry.dtype = storage_dtype(type);
    if (!entry.dtype) refuse_pickle("storages of type ", type, " are not supported");
  }
  if (entry.elements < 0) refuse_pickle("a storage has ", entry.elements, " elements");
  const auto item = entry.dtype ? static_cast<int64_t>(c10::elementSize(*entry.dtype)) : 1;
  const auto bytes = static_cast<uint64_t>(checked_product(entry.elements, item));
  const auto& key = string(parts[2]);
  const auto& device = string(parts[3]);
  spend(key.size());
  const auto [found, is_new] = claim_of_.emplace(key, static_cast<uint32_t>(claims_.size()));
  if (is_new) {
    spend(sizeof(StorageClaim) + key.size() + device.size());
    claims_.push_back({key, 0, device});
  }
  entry.claim = found->second;
  claims_[entry.claim].bytes = std::max(claims_[entry.claim].bytes, bytes);
  spend(sizeof(StorageEntry));
  storage_entries_.push_back(entry);
  return add(NodeKind::kStorage, storage_entries_.size() - 1);
}

Node PickleCalls::tensor(const std::string& function, const std::vector<Node>& arguments) {
  if (arguments.size() < 4 || !is(arguments[0], NodeKind::kStorage)) refuse_pickle("a tensor has no storage");
  const auto& entry = storage_entries_[nodes_[arguments[0]].index];
  auto dtype = entry.dtype;
  if (function.ends_with("_v3")) {
    if (arguments.size() < 7) refuse_pickle("a tensor has no dtype");
    const auto& written = name(arguments[6]);
    constexpr std::string_view kModule = "torch.";
    dtype = dtype_named(written.starts_with(kModule) ? written.substr(kModule.size()) : written);
    if (!dtype) refuse_pickle("it has a tensor of ", written, ", which this LibTorch does not have");
  }
  if (!dtype) refuse_pickle("a tensor has no dtype");
  spend(sizeof(TensorEntry));  // check_growth() adds what LibTorch needs
  TensorEntry tensor{entry.claim, *dtype, integer(arguments[1]), integers(arguments[2]), integers(arguments[3])};
  const auto bytes = static_cast<uint64_t>(
      checked_product(entry.elements, entry.dtype ? static_cast<int64_t>(c10::elementSize(*entry.dtype)) : 1));
  check_inside(tensor, bytes);
  tensors_.push_back(std::move(tensor));
  return add(NodeKind::kTensor, tensors_.size() - 1);
}

// --- NumPy

/// Returns the code of a numpy.dtype without its byte order: "f8".
std::string PickleCalls::numpy_code(Node dtype) {
  if (!is(dtype, NodeKind::kObject) || *entry(dtype).type != "numpy.dtype" || entry(dtype).arguments.empty())
    refuse_pickle("expected a numpy.dtype");
  auto code = string(entry(dtype).arguments[0]);
  if (code.starts_with('>')) refuse_pickle("it has a NumPy array of another byte order");
  if (code.starts_with('<') || code.starts_with('=') || code.starts_with('|')) code.erase(0, 1);
  return code;
}

Node PickleCalls::numpy_scalar(Node arguments) {
  const auto& parts = tuple(arguments, 2);
  const auto code = numpy_code(parts[0]);
  const auto bytes = encoded(parts[1]);
  const auto dtype = dtype_of_bits(code);
  if (!dtype || bytes.size() != c10::elementSize(*dtype)) refuse_pickle("it has a NumPy number of type ", code);
  if (code[0] == 'u') return leaf(Value::integer(bytes + '\0'));
  auto number = at::empty({}, at::TensorOptions(*dtype));
  std::memcpy(number.data_ptr(), bytes.data(), bytes.size());
  if (*dtype == at::kBool) return bytes[0] ? true_ : false_;
  return number.is_floating_point() ? leaf(number.item<double>()) : leaf(number.item<int64_t>());
}

Node PickleCalls::numpy_array(Node sizes, Node type, bool is_fortran, Node content) {
  const auto shape = integers(sizes);
  if (shape.size() > kMaxDimensions)
    refuse_pickle("a NumPy array has ", shape.size(), " dimensions, expected ", kMaxDimensions, " or fewer");
  const auto code = numpy_code(type);
  const auto dtype = dtype_of_bits(code);
  if (!dtype) refuse_pickle("it has a NumPy array of type ", code);
  const auto bytes = encoded(content);
  spend(bytes.size());
  int64_t size = static_cast<int64_t>(c10::elementSize(*dtype));
  bool is_empty = false;
  for (int64_t extent : shape) {
    if (extent < 0) refuse_pickle("a NumPy array has an extent of ", extent);
    is_empty |= extent == 0;
    size = checked_product(
        size, std::max<int64_t>(1, extent));  // LibTorch also multiplies the other extents of an empty tensor
  }
  if (is_empty) size = 0;
  if (static_cast<uint64_t>(size) != bytes.size())
    refuse_pickle("a NumPy array has ", bytes.size(), " bytes, expected ", size);
  auto reversed = shape;
  std::reverse(reversed.begin(), reversed.end());
  auto array = at::empty(is_fortran ? reversed : shape, at::TensorOptions(*dtype));
  if (!bytes.empty()) std::memcpy(array.data_ptr(), bytes.data(), bytes.size());
  if (is_fortran) {
    std::vector<int64_t> order;
    for (int64_t d = array.dim() - 1; d >= 0; --d) order.push_back(d);
    array = array.permute(order);
  }
  return leaf(array);
}

/// Applies a state, as __setstate__ would.
Node PickleCalls::build(Node target, Node state) {
  if (!is(target, NodeKind::kObject)) return target;  // attributes of a dict or a tensor, such as _metadata
  if (*entry(target).type == "numpy.ndarray") {       // (version, shape, dtype, is_fortran, bytes)
    const auto& parts = tuple(state, 5);
    return numpy_array(parts[1], parts[2], parts[3] == true_, parts[4]);
  }
  if (is(state, NodeKind::kDict)) {
    add_items(target, elements(state));
  } else if (is(state, NodeKind::kTuple)) {  // (attributes, slots), or a state of its own kind
    spend(elements(state).size() * sizeof(Node));
    for (Node part : elements(state))
      if (is(part, NodeKind::kDict)) add_items(target, elements(part));
  } else if (state != none_) {
    entry(target).arguments.push_back(state);
  }
  return target;
}

}  // namespace lockstep::detail
