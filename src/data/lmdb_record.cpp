// Encoding and decoding of records, for builds with and without LMDB.

#include <map>
#include <string>

#include <lockstep/error.h>
#include <lockstep/lmdb.h>
#include <lockstep/safetensors.h>

#include "base/text.h"

namespace lockstep {

torch::data::Example<> example_of_record(std::string_view, std::string_view value) {
  auto tensors = from_safetensors(value);
  if (!tensors.contains("data"))
    throw UsageError(
        text("LMDB: the record has no tensor 'data'; pass LmdbDataset a function that decodes its records"));
  return {tensors.at("data"), tensors["target"]};
}

void LmdbWriter::add(const torch::data::Example<>& sample) {
  std::map<std::string, at::Tensor> tensors{{"data", sample.data}};
  if (sample.target.defined()) tensors.emplace("target", sample.target);
  add(to_safetensors(tensors));
}

}  // namespace lockstep
