#include <lockstep/checkpoint_file.h>

#include <exception>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/archive.h"
#include "checkpoint/files.h"
#include "checkpoint/safetensors.h"

namespace lockstep {
namespace {

/// The first bytes of files that torch.save wrote before PyTorch 1.6: a pickle of a magic number.
constexpr std::string_view kLegacyStart("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e", 15);

void refuse_other_formats(const detail::ByteSource& source) {
  if (source.size() >= kLegacyStart.size() && source.read(0, kLegacyStart.size()) == kLegacyStart)
    throw CheckpointError(
        "is in the legacy format of torch.save (before PyTorch 1.6), which is not supported; convert it in Python: "
        "torch.save(torch.load(path), path)");
}

/// Runs `body` and adds the path to its errors.
template <class Body>
auto about_file(const std::string& path, const Body& body) {
  try {
    return body();
  } catch (const CheckpointError&) {
    rethrow_with_prefix(std::current_exception(), text("checkpoint ", path, ": "));
  }
}

Value from_tensors(const std::map<std::string, at::Tensor>& tensors) {
  auto dict = Value::dict();
  for (const auto& [name, tensor] : tensors) dict.items().emplace_back(name, tensor);
  return dict;
}

}  // namespace

MapLocation::MapLocation(std::vector<std::pair<c10::Device, c10::Device>> map)
    : function_([map = std::move(map)](c10::Device saved) {
        for (const auto& [from, to] : map)
          if (from == saved) return to;
        return saved;
      }) {}

c10::Device MapLocation::operator()(const std::string& saved) const {
  if (!function_) return device_;
  std::optional<c10::Device> device;
  try {
    device.emplace(saved);
  } catch (const c10::Error&) {
    throw CheckpointError(text("has a tensor of device '", saved,
                               "', which this LibTorch does not know; pass one device as map_location"));
  }
  return function_(*device);
}

std::string save_checkpoint(const std::string& path, const Value& value) {
  detail::AtomicFile file(path);
  auto digest = detail::write_archive(file, value);
  file.commit();
  return digest;
}

void save_safetensors(const std::string& path, const std::map<std::string, at::Tensor>& tensors) {
  detail::AtomicFile file(path);
  detail::write_safetensors(file, tensors);
  file.commit();
}

Value detail::load_with_digests(const std::string& path, const LoadOptions& options,
                                std::vector<LoadedRecord>* loaded) {
  return about_file(path, [&] {
    const detail::FileSource source(path);
    refuse_other_formats(source);
    if (detail::looks_like_safetensors(source))
      return from_tensors(detail::read_safetensors(source, options.map_location("cpu")));
    return detail::ArchiveReader(source).load(options, loaded);
  });
}

Value load_checkpoint(const std::string& path, const LoadOptions& options) {
  return detail::load_with_digests(path, options, nullptr);
}

std::string describe(const Damage& damage) {
  return damage.record.empty() ? damage.what : text("record '", damage.record, "' ", damage.what);
}

Verification verify_checkpoint(const std::string& path) {
  return about_file(path, [&] {
    const detail::FileSource source(path);
    Verification result;
    result.bytes = source.size();
    try {
      refuse_other_formats(source);
      if (detail::looks_like_safetensors(source)) {
        result.records = detail::read_safetensors(source, c10::kMeta).size();
        return result;
      }
      const detail::ArchiveReader reader(source);
      result.has_manifest = reader.has_manifest();
      result.sha256 = reader.sha256();
      result.records = reader.size();
      result.damage = reader.verify();
    } catch (const CheckpointError& error) {
      result.damage.push_back({"", error.what()});
    }
    return result;
  });
}

}  // namespace lockstep
