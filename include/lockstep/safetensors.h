#pragma once

#include <map>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>

namespace lockstep {

/// Serializes named tensors in the safetensors format, which Python reads with safetensors.torch.load. Tensors are
/// copied to the CPU. Throws UsageError for a dtype that the format does not have, an undefined tensor or an invalid
/// name.
LOCKSTEP_EXPORT std::string to_safetensors(const std::map<std::string, at::Tensor>& tensors);

/// Returns the tensors in the bytes, as copies on the CPU. Ignores metadata. Safe for untrusted bytes: memory grows
/// with the number of bytes, not with sizes that the header claims. Throws UsageError unless the bytes are one complete
/// safetensors file.
LOCKSTEP_EXPORT std::map<std::string, at::Tensor> from_safetensors(std::string_view bytes);

}  // namespace lockstep
