#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include <lockstep/value.h>

namespace lockstep::checkpoint {

/// A value in a checkpoint that contains no others, such as a tensor, a number or an empty list, with its path.
struct Leaf {
  std::string path;
  Value value;
};

/// All leaves, in the order of the file. Keys and indices are joined with dots: "optimizer.state.0.exp_avg". The class
/// of an object is a leaf "__class__".
std::vector<Leaf> leaves_of(const Value& value);

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// The leaves that are tensors.
std::vector<NamedTensor> tensors_of(const Value& value);

/// Groups of tensors that overlap in memory, by name.
std::vector<std::vector<std::string>> overlapping(const std::vector<NamedTensor>& tensors);

/// The key of an item as a part of a path.
std::string key_text(const Value& key);

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
