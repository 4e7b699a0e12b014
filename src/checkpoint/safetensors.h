#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/safetensors.h>

#include "checkpoint/files.h"

namespace lockstep::detail {

/// Like to_safetensors() and from_safetensors(), on sinks and sources. read_safetensors() throws CheckpointError.
void write_safetensors(ByteSink& sink, const std::map<std::string, at::Tensor>& tensors);
std::map<std::string, at::Tensor> read_safetensors(const ByteSource& source, c10::Device device);

/// Whether the bytes begin like a file of this format.
bool looks_like_safetensors(const ByteSource& source);

}  // namespace lockstep::detail
