#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include <lockstep/value.h>

namespace lockstep::checkpoint {

/// A value in a checkpoint that contains no other values, such as a tensor, a number or an empty list, with its path.
struct Leaf {
  std::string path;
  const Value* value;
};

struct Leaves {
  std::vector<Leaf> all{};
  std::deque<Value> classes{};  // of objects, to which leaves point
};

/// Appends keys and indices to a path while a value is visited. All paths use one string: a file may have many values
/// below one long key.
class Path {
 public:
  /// Calls `visit()` with the key at the end of the path.
  template <class Visit>
  void inside(const std::string& key, const Visit& visit) {
    const size_t outer = text_.size();
    if (outer > 0) text_ += '.';
    text_ += key;
    visit();
    text_.resize(outer);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// Limits the memory of the paths of a file's entries. Many short entries may have one long key.
class PathBudget {
 public:
  /// The error ends with `remedy`.
  PathBudget(std::string file, std::string remedy);

  /// Throws CheckpointError if the paths so far have more than 32 bytes for each byte of the file with its shards, and
  /// 1 MiB.
  void spend(const std::string& path);

 private:
  const std::string file_, remedy_;
  const uint64_t file_bytes_;
  uint64_t paths_ = 0, bytes_ = 0;
};

/// All leaves, in the order of the file; they point into `value`. Keys and indices are joined with dots:
/// "optimizer.state.0.exp_avg". The class of an object is a leaf "__class__".
Leaves leaves_of(const Value& value, PathBudget& budget);

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// The leaves that are tensors.
std::vector<NamedTensor> tensors_of(const Value& value, PathBudget& budget);

struct Totals {
  uint64_t tensors = 0, elements = 0, bytes = 0;  // at most 2^64 - 1

  void add(const at::Tensor& tensor);
};

/// The contents of a value, including the values in it.
struct Contents {
  Totals totals;
  bool has_others = false;  // leaves that are not tensors

  void add(const Contents& other);
};

/// The contents of all values in a value, by address. Computes the contents of each value once, however deeply values
/// are nested.
class ContentsOf {
 public:
  explicit ContentsOf(const Value& value) { compute(value); }
  /// `value` is the value that was passed to the constructor, or a value in it.
  Contents operator[](const Value& value) const;

 private:
  Contents compute(const Value& value);

  std::unordered_map<const Value*, Contents> containers_;  // the containers that are not empty
};

/// Groups of tensors that overlap in memory, by name.
std::vector<std::vector<std::string>> overlapping(const std::vector<NamedTensor>& tensors);

/// Whether the value contains other values.
bool is_container(const Value& value);

/// The key of an item as a part of a path.
std::string key_text(const Value& key);

/// Calls `visit(key, inner)` for all values in a container, with their keys or indices as text.
template <class Visit>
void for_each_inside(const Value& value, const Visit& visit) {
  if (!value.is(Value::Kind::kDict))
    for (size_t i = 0; i < value.elements().size(); ++i) visit(std::to_string(i), value.elements()[i]);
  if (value.is(Value::Kind::kDict) || value.is(Value::Kind::kObject))
    for (const auto& [key, inner] : value.items()) visit(key_text(key), inner);
}

/// "[10, 84]".
std::string shape_text(const at::Tensor& tensor);

uint64_t bytes_of(const at::Tensor& tensor);

/// Tensors become {"shape": ..., "dtype": ...}. Values that JSON does not have become text as Python prints it.
nlohmann::ordered_json to_json(const Value& value);

/// Prints an object on one line of stdout.
void print_json(const nlohmann::ordered_json& object);

/// The value of an entry of a dict; null if there is none, or if the value is not a dict.
const Value* find_entry(const Value& value, const char* key);

/// Loads a checkpoint on the CPU, merged with its shards, and compares all files with their checksums. Throws
/// UsageError if there is no such file.
Value load_whole(const std::string& path);

}  // namespace lockstep::checkpoint
