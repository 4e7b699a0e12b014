// A pickle is a program for a stack machine. Its opcodes push values, collect them into containers and call functions
// that the pickle names. This machine calls nothing: it knows the few functions that PyTorch's files name, and computes
// their results itself (PickleCalls). Any other function that the pickle "calls" becomes an object, which is data.
//
// Values on the stack are nodes, referred to by number, because a pickle may change a container after it was referred
// to. At the end check_growth() finds loops and repeated references, which could make a small pickle huge, and the
// result is converted to a Value.

#include <bit>
#include <cstring>

#include <ATen/ATen.h>

#include "checkpoint/pickle_nodes.h"

namespace lockstep::detail {

/// Reads the arguments of opcodes.
class PickleBytes {
 public:
  explicit PickleBytes(std::string_view bytes) : bytes_(bytes) {}

  std::string_view take(uint64_t size) {
    if (size > bytes_.size()) refuse_pickle("it ends where ", size, " more bytes are expected");
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

class PickleReader::Machine : public PickleCalls {
 public:
  explicit Machine(std::string_view bytes) : PickleCalls(bytes.size()), code_(bytes) {
    while (step(static_cast<unsigned char>(code_.take(1)[0]))) {
    }
    std::vector<Node>().swap(stack_);  // `= {}` would keep the memory
    std::vector<size_t>().swap(marks_);
    std::vector<Node>().swap(memo_);
    sparse_memo_.clear();
    check_growth(result_);
  }

  Value result(const ReadStorage& read) const {
    Conversion conversion{*this, {}, std::vector<at::Tensor>(tensors_.size())};
    for (const auto& claim : claims_) {
      auto bytes = read(claim);
      if (bytes.defined() && static_cast<uint64_t>(bytes.nbytes()) < claim.bytes)
        refuse_pickle("storage '", claim.key, "' has ", bytes.nbytes(), " bytes, expected ", claim.bytes);
      conversion.storages.push_back(std::move(bytes));
    }
    return conversion.convert(result_);
  }

 private:
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
  void memoize(uint64_t place) {
    if (place < memo_.size())
      memo_[place] = top();
    else if (place == memo_.size())
      memo_.push_back(top()), sparse_memo_.erase(place);
    else
      sparse_memo_[place] = top();
  }
  void recall(uint64_t place) {
    if (place < memo_.size()) return push(memo_[place]);
    const auto found = sparse_memo_.find(place);
    if (found == sparse_memo_.end()) refuse_pickle("it refers to value ", place, ", which does not exist");
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
        push(byte(code_.number<uint8_t>()));
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
        memoize(memo_.size() + sparse_memo_.size());
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

  // --- conversion

  struct Conversion {
    const Machine& machine;
    std::vector<at::Tensor> storages;
    std::vector<at::Tensor> views;  // of the tensors: repeated references give the same tensor, as in Python

    Value convert(Node node) {
      const auto [kind, index] = machine.nodes_[node];
      switch (kind) {
        case NodeKind::kLeaf:
          return machine.leaves_[index];
        case NodeKind::kList:
          return Value::list(all(machine.sequences_[index]));
        case NodeKind::kTuple:
          return Value::tuple(all(machine.sequences_[index]));
        case NodeKind::kSet:
          return Value::set(all(machine.sequences_[index]));
        case NodeKind::kDict:
          return Value::dict(pairs(machine.sequences_[index]));
        case NodeKind::kObject: {
          const auto& object = machine.objects_[index];
          auto entries = pairs(object.entries);
          // A module or archive of LibTorch or TorchScript.
          if (object.type->starts_with("__torch__.")) return Value::dict(std::move(entries));
          return Value::object(*object.type, all(object.arguments), std::move(entries));
        }
        case NodeKind::kGlobal:
          return named(machine.names_[index]);
        case NodeKind::kStorage:
          refuse_pickle("it has a storage without a tensor; save tensors");
        case NodeKind::kTensor:
          if (!views[index].defined()) views[index] = view(machine.tensors_[index]);
          return views[index];
      }
      refuse_pickle("it is inconsistent");
    }

    std::vector<Value> all(const std::vector<Node>& nodes) {
      std::vector<Value> values;
      values.reserve(nodes.size());
      for (Node node : nodes) values.push_back(convert(node));
      return values;
    }

    Value::Items pairs(const std::vector<Node>& nodes) {
      Value::Items items;
      items.reserve(nodes.size() / 2);
      for (size_t i = 0; i + 1 < nodes.size(); i += 2) items.emplace_back(convert(nodes[i]), convert(nodes[i + 1]));
      return items;
    }

    /// A dtype, or a class that is used as a value.
    Value named(const std::string& name) {
      constexpr std::string_view kModule = "torch.";
      if (name.starts_with(kModule))
        if (const auto dtype = dtype_named(name.substr(kModule.size()))) return *dtype;
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

  PickleBytes code_;
  std::vector<Node> stack_;
  std::vector<size_t> marks_;
  // Places are numbered from 0 in real files. No hash table: a file could choose places that collide.
  std::vector<Node> memo_;
  std::map<uint64_t, Node> sparse_memo_;
  Node result_ = 0;
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
