#pragma once

#include <map>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>

namespace lockstep {

/// Named tensors as bytes in the safetensors format, which many languages read (in Python: safetensors.torch.load).
/// Tensors are copied to the CPU. Throws UsageError for a type that the format does not have.
LOCKSTEP_EXPORT std::string to_safetensors(const std::map<std::string, at::Tensor>& tensors);

/// The tensors in such bytes, on the CPU, with memory of their own; metadata is passed over. Bytes may be hostile:
/// memory grows with what is there, never with what is claimed. Throws UsageError for anything that is not one whole
/// safetensors.
LOCKSTEP_EXPORT std::map<std::string, at::Tensor> from_safetensors(std::string_view bytes);

}  // namespace lockstep
