// A pickle is a program for a stack machine. Its opcodes push values, collect them into containers and call what the
// pickle names. This machine has no calls: it knows the few functions that PyTorch's files name, and does itself what
// they would do. Everything else that is "called" becomes an object, which is data.
//
// Values on the stack are nodes, referred to by number, because a pickle may change a container after it was referred
// to. A node is converted to a Value at the end. That conversion is where loops and repeated references, which could
// make a small pickle huge, are found.

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <optional>
#include <unordered_map>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "checkpoint/pickle.h"

namespace lockstep::detail {
namespace {

constexpr size_t kDeepest = 500;         // nesting of containers
constexpr size_t kGrowth = 256;          // bytes of values for each byte of the pickle
constexpr size_t kFreeGrowth = 1 << 20;  // bytes of values for any pickle
constexpr size_t kBytesOfValue = 2 * sizeof(Value);

template <class... Parts>
[[noreturn]] void refuse_pickle(const Parts&... parts) {
  throw CheckpointError(text("the pickle cannot be read: ", parts...));
}

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

}  // namespace

/// Types of the machine's members.
namespace pickle_machine {

/// A reference to a value on the machine.
using Node = uint32_t;

enum class NodeKind : uint8_t { kLeaf, kList, kTuple, kSet, kDict, kObject, kGlobal, kStorage, kTensor };

struct NodeEntry {
  NodeKind kind;
  uint32_t index;  // in the list of its kind
};

struct ObjectEntry {
  std::string type;
  std::vector<Node> arguments;
  std::vector<Node> entries;  // keys and values in turn
};

struct TensorEntry {
  uint32_t storage;
  at::ScalarType dtype;
  int64_t offset;
  std::vector<int64_t> sizes, strides;
};

struct StorageEntry {
  uint32_t claim;                       // index into the claims
  std::optional<at::ScalarType> dtype;  // none if the storage is untyped
  int64_t elements;
};

/// Reads the arguments of opcodes.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : bytes_(bytes) {}

  std::string_view take(uint64_t size) {
    if (size > bytes_.size()) refuse_pickle("it ends after ", size, " more bytes were expected");
    const auto taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view line() {
    const auto end = bytes_.find('\n');
    if (end == std::string_view::npos) refuse_pickle("a line has no end");
    const auto taken = bytes_.substr(0, end);
    bytes_.remove_prefix(end + 1);
    return taken;
  }

 private:
  std::string_view bytes_;
};

}  // namespace pickle_machine

using namespace pickle_machine;

class PickleReader::Machine {
 public:
  explicit Machine(std::string_view bytes) : code_(bytes), whole_budget_(kFreeGrowth + kGrowth * bytes.size()) {
    none_ = leaf(Value());
    true_ = leaf(true);
    false_ = leaf(false);
    empty_tuple_ = sequence(NodeKind::kTuple, {});
    while (step(static_cast<unsigned char>(code_.take(1)[0]))) {
    }
  }

  const std::vector<StorageClaim>& claims() const { return claims_; }

  Value result(const ReadStorage& read) const {
    Conversion conversion{*this, {}, whole_budget_};
    for (const auto& claim : claims_) {
      auto bytes = read(claim);
      if (bytes.defined() && static_cast<uint64_t>(bytes.nbytes()) < claim.bytes)
        refuse_pickle("storage '", claim.key, "' has ", bytes.nbytes(), " bytes, expected ", claim.bytes);
      conversion.storages.push_back(std::move(bytes));
    }
    return conversion.convert(result_, 0);
  }

 private:
  // --- nodes

  /// Opcodes of a few bytes can copy what earlier ones have made: limits how much a pickle may grow.
  void spend(size_t bytes) {
    if (bytes > budget_) refuse_growth();
    budget_ -= bytes;
  }
  [[noreturn]] static void refuse_growth() {
    refuse_pickle("its values would be far larger than the pickle: it is damaged or hostile");
  }

  Node add(NodeKind kind, size_t index) {
    nodes_.push_back({kind, static_cast<uint32_t>(index)});
    return static_cast<Node>(nodes_.size() - 1);
  }
  Node leaf(Value value) {
    const bool is_text = value.is(Value::Kind::kString) || value.is(Value::Kind::kBytes);
    spend(sizeof(Value) + (is_text ? value.as_string().size() : 0));
    leaves_.push_back(std::move(value));
    return add(NodeKind::kLeaf, leaves_.size() - 1);
  }
  Node sequence(NodeKind kind, std::vector<Node> elements) {
    spend((elements.size() + 8) * sizeof(Node));
    sequences_.push_back(std::move(elements));
    return add(kind, sequences_.size() - 1);
  }
  Node object(std::string type, std::vector<Node> arguments) {
    spend(type.size() + (arguments.size() + 8) * sizeof(Node));
    objects_.push_back({std::move(type), std::move(arguments), {}});
    return add(NodeKind::kObject, objects_.size() - 1);
  }
  Node global(std::string_view module, std::string_view name) {
    spend(module.size() + name.size());
    globals_.push_back(text(module, ".", name));
    return add(NodeKind::kGlobal, globals_.size() - 1);
  }

  NodeKind kind(Node node) const { return nodes_[node].kind; }
  bool is(Node node, NodeKind wanted) const { return kind(node) == wanted; }
  bool is_sequence(Node node) const {
    return is(node, NodeKind::kList) || is(node, NodeKind::kTuple) || is(node, NodeKind::kSet);
  }
  const std::vector<Node>& elements(Node node) const { return sequences_[nodes_[node].index]; }
  std::vector<Node>& elements(Node node) { return sequences_[nodes_[node].index]; }
  const Value& value(Node node) const { return leaves_[nodes_[node].index]; }
  ObjectEntry& entry(Node node) { return objects_[nodes_[node].index]; }

  const std::vector<Node>& tuple(Node node, size_t least) const {
    if (!is(node, NodeKind::kTuple) || elements(node).size() < least)
      refuse_pickle("expected a tuple of ", least, " or more values");
    return elements(node);
  }
  int64_t integer(Node node) const {
    if (!is(node, NodeKind::kLeaf) || !value(node).is(Value::Kind::kInt)) refuse_pickle("expected an integer");
    return value(node).as_int();
  }
  const std::string& string(Node node) const {
    if (!is(node, NodeKind::kLeaf) || !(value(node).is(Value::Kind::kString) || value(node).is(Value::Kind::kBytes)))
      refuse_pickle("expected a string");
    return value(node).as_string();
  }
  const std::string& name(Node node) const {
    if (!is(node, NodeKind::kGlobal)) refuse_pickle("expected the name of a class or function");
    return globals_[nodes_[node].index];
  }
  std::vector<int64_t> integers(Node node) const {
    std::vector<int64_t> result;
    for (Node element : tuple(node, 0)) result.push_back(integer(element));
    return result;
  }

  // --- stack

  void push(Node node) { stack_.push_back(node); }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Node top() const {
    if (stack_.size() <= floor()) refuse_pickle("its stack is empty");
    return stack_.back();
  }
  Node pop() {
    const Node node = top();
    stack_.pop_back();
    return node;
  }
  std::vector<Node> pop_to_mark() {
    if (marks_.empty()) refuse_pickle("a mark is missing");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Node> values(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return values;
  }
  void memoize(uint64_t place) { memo_[place] = top(); }
  void recall(uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) refuse_pickle("it refers to value ", place, ", which does not exist");
    push(found->second);
  }

  // --- opcodes

  /// Executes one opcode and returns whether more follow.
  bool step(unsigned char opcode) {
    switch (opcode) {
      case 0x80:  // PROTO
        if (const auto protocol = code_.number<uint8_t>(); protocol > 5) refuse_pickle("its protocol is ", protocol);
        break;
      case 0x95:  // FRAME
        code_.take(8);
        break;
      case '.':
        result_ = pop();
        return false;
      case '(':
        marks_.push_back(stack_.size());
        break;
      case '0':
        pop();
        break;
      case '1':
        pop_to_mark();
        break;
      case '2':
        push(top());
        break;
      case 'N':
        push(none_);
        break;
      case 0x88:
        push(true_);
        break;
      case 0x89:
        push(false_);
        break;
      case 'J':
        push(leaf(code_.number<int32_t>()));
        break;
      case 'K':
        push(leaf(code_.number<uint8_t>()));
        break;
      case 'M':
        push(leaf(code_.number<uint16_t>()));
        break;
      case 0x8a:
        push(leaf(Value::integer(std::string(code_.take(code_.number<uint8_t>())))));
        break;
      case 0x8b:
        push(leaf(Value::integer(std::string(code_.take(code_.number<uint32_t>())))));
        break;
      case 'G':
        push(leaf(big_endian_double(code_.take(8))));
        break;
      case 'X':
      case 'T':
        push(leaf(code_.take(code_.number<uint32_t>())));
        break;
      case 0x8c:
      case 'U':
        push(leaf(code_.take(code_.number<uint8_t>())));
        break;
      case 0x8d:
        push(leaf(code_.take(code_.number<uint64_t>())));
        break;
      case 'B':
        push(leaf(Value::bytes(std::string(code_.take(code_.number<uint32_t>())))));
        break;
      case 'C':
        push(leaf(Value::bytes(std::string(code_.take(code_.number<uint8_t>())))));
        break;
      case 0x8e:
      case 0x96:
        push(leaf(Value::bytes(std::string(code_.take(code_.number<uint64_t>())))));
        break;
      case 'q':
        memoize(code_.number<uint8_t>());
        break;
      case 'r':
        memoize(code_.number<uint32_t>());
        break;
      case 0x94:
        memoize(memo_.size());
        break;
      case 'h':
        recall(code_.number<uint8_t>());
        break;
      case 'j':
        recall(code_.number<uint32_t>());
        break;
      case 'c': {
        const auto module = code_.line();
        push(global(module, code_.line()));
        break;
      }
      case 0x93: {  // STACK_GLOBAL
        const Node name = pop(), module = pop();
        push(global(string(module), string(name)));
        break;
      }
      default:
        collect(opcode);
    }
    return true;
  }

  /// Opcodes that make containers, objects and tensors.
  void collect(unsigned char opcode) {
    switch (opcode) {
      case ']':
        return push(sequence(NodeKind::kList, {}));
      case ')':
        return push(empty_tuple_);
      case '}':
        return push(sequence(NodeKind::kDict, {}));
      case 0x8f:
        return push(sequence(NodeKind::kSet, {}));
      case 'l':
        return push(sequence(NodeKind::kList, pop_to_mark()));
      case 't':
        return push(sequence(NodeKind::kTuple, pop_to_mark()));
      case 0x91:
        return push(sequence(NodeKind::kSet, pop_to_mark()));
      case 'd': {
        const auto items = pop_to_mark();
        push(sequence(NodeKind::kDict, {}));
        return add_items(top(), items);
      }
      case 0x85:
      case 0x86:
      case 0x87: {
        std::vector<Node> items(opcode - 0x84u);
        for (auto item = items.rbegin(); item != items.rend(); ++item) *item = pop();
        return push(sequence(NodeKind::kTuple, std::move(items)));
      }
      case 'a': {
        const Node item = pop();
        return add_elements(top(), {item});
      }
      case 'e':
      case 0x90: {
        const auto items = pop_to_mark();
        return add_elements(top(), items);
      }
      case 's': {
        const Node item = pop(), key = pop();
        return add_items(top(), {key, item});
      }
      case 'u': {
        const auto items = pop_to_mark();
        return add_items(top(), items);
      }
      case 'Q':
        return push(storage(pop()));
      case 'R': {
        const Node arguments = pop(), function = pop();
        return push(call(name(function), arguments));
      }
      case 0x81: {  // NEWOBJ
        const Node arguments = pop(), type = pop();
        return push(call(name(type), arguments));
      }
      case 0x92: {  // NEWOBJ_EX
        pop();
        const Node arguments = pop(), type = pop();
        return push(call(name(type), arguments));
      }
      case 'b': {
        const Node state = pop();
        const Node target = pop();
        return push(build(target, state));
      }
      default:
        refuse_pickle("it has opcode ", static_cast<int>(opcode), ", which PyTorch's files do not use");
    }
  }

  static double big_endian_double(std::string_view bytes) {
    uint64_t bits = 0;
    for (char byte : bytes) bits = bits << 8 | static_cast<unsigned char>(byte);
    return std::bit_cast<double>(bits);
  }

  void add_elements(Node target, const std::vector<Node>& items) {
    auto& list = is(target, NodeKind::kObject)                               ? entry(target).arguments
                 : is(target, NodeKind::kList) || is(target, NodeKind::kSet) ? elements(target)
                                                                             : refuse_target("elements");
    spend(items.size() * sizeof(Node));
    list.insert(list.end(), items.begin(), items.end());
  }

  void add_items(Node target, const std::vector<Node>& items) {
    if (items.size() % 2 != 0) refuse_pickle("a key has no value");
    auto& list = is(target, NodeKind::kObject) ? entry(target).entries
                 : is(target, NodeKind::kDict) ? elements(target)
                                               : refuse_target("items");
    spend(items.size() * sizeof(Node));
    list.insert(list.end(), items.begin(), items.end());
  }

  [[noreturn]] static std::vector<Node>& refuse_target(const char* what) {
    refuse_pickle("it adds ", what, " to a value that has none");
  }

  // --- what PyTorch's files call

  /// Does what the function or class of this name would do with the arguments.
  Node call(const std::string& function, Node arguments) {
    const auto& list = tuple(arguments, 0);
    const auto is_a = [&](std::initializer_list<std::string_view> names) { return is_one_of(function, names); };
    if (is_a({"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v3"}))
      return tensor(function, list);
    if (is_a({"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
              "torch.nn.parameter.Parameter", "torch.jit._pickle.restore_type_tag"}) ||
        is_a({"torch.jit._pickle.build_intlist", "torch.jit._pickle.build_doublelist",
              "torch.jit._pickle.build_boollist", "torch.jit._pickle.build_tensorlist"}))
      return tuple(arguments, 1)[0];
    if (function == "torch._tensor._rebuild_from_type_v2") {
      const auto& parts = tuple(arguments, 3);
      if (name(parts[0]) == function) refuse_pickle("a tensor is built from itself");
      return call(std::string(name(parts[0])), parts[2]);
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
      return object("numpy.ndarray", {});
    if (is_a({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})) {
      const auto& parts = tuple(arguments, 4);
      return numpy_array(parts[2], parts[1], string(parts[3]) == "F", parts[0]);
    }
    if (is_a({"builtins.getattr", "__builtin__.getattr"})) {  // a member of an enumeration
      const auto& parts = tuple(arguments, 2);
      return object(text(name(parts[0]), ".", string(parts[1])), {});
    }
    if (function == "copyreg._reconstructor") return object(name(tuple(arguments, 1)[0]), {});
    return object(function, list);
  }

  const std::vector<Node>& listed(Node node) const {
    if (!is_sequence(node)) refuse_pickle("expected a list or tuple");
    return elements(node);
  }

  std::string encoded(Node node) const {
    const auto& content = string(node);
    return value(node).is(Value::Kind::kBytes) ? content : from_latin1(content);
  }

  /// Arguments are a list of pairs, a dict, or the factory of a defaultdict.
  Node dict_from(const std::vector<Node>& arguments) {
    std::vector<Node> items;
    for (Node argument : arguments) {
      if (is(argument, NodeKind::kDict)) items = elements(argument);
      if (!is(argument, NodeKind::kList)) continue;
      for (Node pair : elements(argument)) {
        const auto& both = listed(pair);
        if (both.size() != 2) refuse_pickle("an item of a dict is no pair");
        items.insert(items.end(), both.begin(), both.end());
      }
    }
    return sequence(NodeKind::kDict, std::move(items));
  }

  Node device(const std::vector<Node>& arguments) {
    try {
      if (arguments.size() == 1) return leaf(c10::Device(string(arguments[0])));
      if (arguments.size() == 2) return leaf(c10::Device(text(string(arguments[0]), ":", integer(arguments[1]))));
    } catch (const Error&) {
      throw;
    } catch (const std::exception&) {
      return leaf(string(arguments[0]));  // a device that this LibTorch does not have, as text
    }
    refuse_pickle("a device has ", arguments.size(), " arguments");
  }

  /// Persistent ids are storages: ("storage", type, key, device, number of elements).
  Node storage(Node id) {
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
    const auto [found, is_new] = claim_of_.emplace(key, static_cast<uint32_t>(claims_.size()));
    if (is_new) claims_.push_back({key, 0, string(parts[3])});
    entry.claim = found->second;
    claims_[entry.claim].bytes = std::max(claims_[entry.claim].bytes, bytes);
    storage_entries_.push_back(entry);
    return add(NodeKind::kStorage, storage_entries_.size() - 1);
  }

  /// "torch.FloatStorage", or "torch.storage.TypedStorage" of a dtype.
  static std::optional<at::ScalarType> storage_dtype(std::string_view type) {
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

  Node tensor(const std::string& function, const std::vector<Node>& arguments) {
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
    TensorEntry tensor{entry.claim, *dtype, integer(arguments[1]), integers(arguments[2]), integers(arguments[3])};
    const auto bytes = static_cast<uint64_t>(
        checked_product(entry.elements, entry.dtype ? static_cast<int64_t>(c10::elementSize(*entry.dtype)) : 1));
    check_inside(tensor, bytes);
    tensors_.push_back(std::move(tensor));
    return add(NodeKind::kTensor, tensors_.size() - 1);
  }

  static void check_inside(const TensorEntry& tensor, uint64_t bytes) {
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

  // --- NumPy

  /// Returns the code of a numpy.dtype without its byte order: "f8".
  std::string numpy_code(Node dtype) {
    if (!is(dtype, NodeKind::kObject) || entry(dtype).type != "numpy.dtype" || entry(dtype).arguments.empty())
      refuse_pickle("expected a numpy.dtype");
    auto code = string(entry(dtype).arguments[0]);
    if (code.starts_with('>')) refuse_pickle("it has a NumPy array of another byte order");
    if (code.starts_with('<') || code.starts_with('=') || code.starts_with('|')) code.erase(0, 1);
    return code;
  }

  Node numpy_scalar(Node arguments) {
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

  Node numpy_array(Node sizes, Node type, bool is_fortran, Node content) {
    const auto shape = integers(sizes);
    const auto code = numpy_code(type);
    const auto dtype = dtype_of_bits(code);
    if (!dtype) refuse_pickle("it has a NumPy array of type ", code);
    const auto bytes = encoded(content);
    spend(bytes.size());
    int64_t size = static_cast<int64_t>(c10::elementSize(*dtype));
    for (int64_t extent : shape) {
      if (extent < 0) refuse_pickle("a NumPy array has an extent of ", extent);
      size = checked_product(size, extent);
    }
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
  Node build(Node target, Node state) {
    if (!is(target, NodeKind::kObject)) return target;  // attributes of a dict or a tensor, such as _metadata
    if (entry(target).type == "numpy.ndarray") {        // (version, shape, dtype, is_fortran, bytes)
      const auto& parts = tuple(state, 5);
      return numpy_array(parts[1], parts[2], parts[3] == true_, parts[4]);
    }
    if (is(state, NodeKind::kDict)) {
      const auto items = elements(state);
      add_items(target, items);
    } else if (is(state, NodeKind::kTuple)) {  // (attributes, slots), or a state of its own kind
      for (Node part : std::vector<Node>(elements(state)))
        if (is(part, NodeKind::kDict)) add_items(target, std::vector<Node>(elements(part)));
    } else if (state != none_) {
      entry(target).arguments.push_back(state);
    }
    return target;
  }

  // --- conversion

  struct Conversion {
    const Machine& machine;
    std::vector<at::Tensor> storages;
    size_t budget;

    Value convert(Node node, size_t depth) {
      if (depth > kDeepest)
        refuse_pickle("its values are nested more than ", kDeepest, " deep, or a value contains itself");
      spend(kBytesOfValue);
      const auto [kind, index] = machine.nodes_[node];
      switch (kind) {
        case NodeKind::kLeaf:
          if (const auto& value = machine.leaves_[index];
              value.is(Value::Kind::kString) || value.is(Value::Kind::kBytes))
            spend(value.as_string().size());
          return machine.leaves_[index];
        case NodeKind::kList:
          return Value::list(all(machine.sequences_[index], depth));
        case NodeKind::kTuple:
          return Value::tuple(all(machine.sequences_[index], depth));
        case NodeKind::kSet:
          return Value::set(all(machine.sequences_[index], depth));
        case NodeKind::kDict:
          return Value::dict(pairs(machine.sequences_[index], depth));
        case NodeKind::kObject: {
          const auto& object = machine.objects_[index];
          spend(object.type.size());
          auto entries = pairs(object.entries, depth);
          // A module or archive of LibTorch or TorchScript.
          if (object.type.starts_with("__torch__.")) return Value::dict(std::move(entries));
          return Value::object(object.type, all(object.arguments, depth), std::move(entries));
        }
        case NodeKind::kGlobal:
          return named(machine.globals_[index]);
        case NodeKind::kStorage:
          refuse_pickle("it has a storage without a tensor; save tensors");
        case NodeKind::kTensor:
          return view(machine.tensors_[index]);
      }
      refuse_pickle("it is inconsistent");
    }

    void spend(size_t bytes) {
      if (bytes > budget) refuse_growth();
      budget -= bytes;
    }

    std::vector<Value> all(const std::vector<Node>& nodes, size_t depth) {
      std::vector<Value> values;
      for (Node node : nodes) values.push_back(convert(node, depth + 1));
      return values;
    }

    Value::Items pairs(const std::vector<Node>& nodes, size_t depth) {
      Value::Items items;
      for (size_t i = 0; i + 1 < nodes.size(); i += 2)
        items.emplace_back(convert(nodes[i], depth + 1), convert(nodes[i + 1], depth + 1));
      return items;
    }

    /// A dtype, or a class that is used as a value.
    Value named(const std::string& name) {
      constexpr std::string_view kModule = "torch.";
      if (name.starts_with(kModule))
        if (const auto dtype = dtype_named(name.substr(kModule.size()))) return *dtype;
      spend(name.size());
      return Value::object(name, {}, {});
    }

    at::Tensor view(const TensorEntry& entry) {
      const auto& bytes = storages[entry.storage];
      if (!bytes.defined())
        return at::empty_strided(entry.sizes, entry.strides, at::TensorOptions(entry.dtype).device(c10::kMeta));
      return at::empty({0}, bytes.options().dtype(entry.dtype))
          .set_(bytes.storage(), entry.offset, entry.sizes, entry.strides);
    }
  };

  Bytes code_;
  const size_t whole_budget_;
  size_t budget_ = whole_budget_;  // what is left of it while the opcodes are executed
  std::vector<NodeEntry> nodes_;
  // Deques: references to their elements stay valid.
  std::deque<Value> leaves_;
  std::deque<std::vector<Node>> sequences_;  // of lists, tuples, sets and dicts
  std::vector<ObjectEntry> objects_;
  std::vector<std::string> globals_;
  std::vector<StorageEntry> storage_entries_;
  std::vector<TensorEntry> tensors_;
  std::vector<StorageClaim> claims_;
  std::unordered_map<std::string, uint32_t> claim_of_;
  std::vector<Node> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, Node> memo_;
  Node none_ = 0, true_ = 0, false_ = 0, empty_tuple_ = 0, result_ = 0;
};

PickleReader::PickleReader(std::string_view bytes) : machine_(std::make_unique<Machine>(bytes)) {}

PickleReader::~PickleReader() = default;

const std::vector<StorageClaim>& PickleReader::storages() const {
  return machine_->claims();
}

Value PickleReader::value(const ReadStorage& read) const {
  return machine_->result(read);
}

}  // namespace lockstep::detail
