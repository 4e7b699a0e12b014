#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/export.h>
#include <lockstep/value.h>

namespace lockstep {

/// Decides on which device the tensors of a file are loaded. Default: the CPU. No other device is used, whatever the
/// devices were on which the tensors were saved.
class LOCKSTEP_EXPORT MapLocation {
 public:
  using Function = std::function<c10::Device(c10::Device saved)>;

  MapLocation() = default;
  /// All tensors to one device: `{.map_location = world.device()}`. On torch::kMeta, tensors have sizes and dtypes, but
  /// no data is read.
  MapLocation(c10::Device device) : device_(device) {}
  MapLocation(c10::DeviceType device) : device_(device) {}
  /// By the device on which a tensor was saved. Devices that are not listed stay as they are.
  MapLocation(std::vector<std::pair<c10::Device, c10::Device>> map);
  MapLocation(Function function) : function_(std::move(function)) {}

  c10::Device operator()(const std::string& saved) const;
  bool is_meta() const { return !function_ && device_.type() == c10::kMeta; }

 private:
  c10::Device device_{c10::kCPU};
  Function function_{};
};

struct LoadOptions {
  MapLocation map_location{};
  /// Compare the file with its checksums. Files of lockstep have a SHA-256 of each record and of the file; other files
  /// of PyTorch have only a CRC-32 of each record. Without it, damage of tensors is not noticed.
  bool verify = true;
};

/// Saves a value in PyTorch's file format (.pt). Python reads it with torch.load(path, weights_only=True), PyTorch 1.13
/// with torch.load(path). The file appears under its name only when it is complete and on disk; a file that has the
/// name is replaced then. Tensors are saved as CPU tensors. Tensors that overlap in memory still do after loading.
/// Not collective. Throws UsageError if Python could not load the value, SystemError if the file cannot be written;
/// a file that had the name is intact then, unless the error says that the new file is complete: only its folder could
/// not be synced.
///
/// Returns the file's SHA-256 from its manifest. It covers every byte, but by way of the SHA-256s of the records
/// (docs/checkpoints.md), so it differs from the output of `sha256sum`.
LOCKSTEP_EXPORT std::string save_checkpoint(const std::string& path, const Value& value);

/// Loads a file of save_checkpoint(), of Python's torch.save, of LibTorch's torch::save or OutputArchive, of
/// TorchScript (without its code), or in the safetensors format. Executes nothing that the file contains, so it is safe
/// for untrusted files. Modules and archives of LibTorch become nested dicts. Python classes other than those of a
/// state_dict become values of kind object. Attributes of an OrderedDict (_metadata) are left out.
///
/// Not collective. Throws CheckpointError, which names the file and the record, if the file is missing, damaged or of
/// another format; SystemError if it cannot be read.
LOCKSTEP_EXPORT Value load_checkpoint(const std::string& path, const LoadOptions& options = {});

/// A file that has a part of a checkpoint, in the same folder.
struct ShardFile {
  std::string file;
  std::string sha256;  ///< as save_checkpoint() has returned it
};

/// Returns the shards that a checkpoint of a CheckpointDirectory lists; none if it has none. Throws CheckpointError if
/// the list is invalid.
LOCKSTEP_EXPORT std::vector<ShardFile> shards_of(const Value& checkpoint);

/// Loads a checkpoint that a CheckpointDirectory has written with shards as if it had none: reads the shards' files,
/// which are in the same folder, and merges them. Loads other files as load_checkpoint() does.
LOCKSTEP_EXPORT Value load_merged_checkpoint(const std::string& path, const LoadOptions& options = {});

/// One record of a checkpoint file, or the file's structure ("").
struct Damage {
  std::string record;
  std::string what;
  std::vector<std::string> tensors{};  ///< paths of the tensors in the record: "model.fc.weight"; empty if unknown
};

/// "record 'data/1' differs from its SHA-256".
LOCKSTEP_EXPORT std::string describe(const Damage& damage);

struct Verification {
  bool has_manifest = false;  ///< written by lockstep: every byte of the file is covered
  std::string sha256{};       ///< as save_checkpoint() has returned it; empty without a manifest
  uint64_t bytes = 0;
  size_t records = 0;
  std::vector<Damage> damage{};  ///< empty if the file is intact
};

/// Compares a file with its checksums, without loading it. Finds all damaged records. Not collective. Throws
/// CheckpointError if there is no such file, SystemError if it cannot be read.
LOCKSTEP_EXPORT Verification verify_checkpoint(const std::string& path);

/// Writes named tensors to a file in the safetensors format, as to_safetensors() does, and as durably as
/// save_checkpoint() does. load_checkpoint() reads it.
LOCKSTEP_EXPORT void save_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors);

}  // namespace lockstep
