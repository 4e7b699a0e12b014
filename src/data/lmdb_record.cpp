// Encoding and decoding of records, for builds with and without LMDB.

#include <utility>

#include <lockstep/error.h>
#include <lockstep/group_loader.h>
#include <lockstep/lmdb.h>
#include <lockstep/safetensors.h>

#include "base/text.h"

namespace lockstep {

torch::data::Example<> example_of_record(std::string_view, std::string_view value) {
  auto tensors = from_safetensors(value);
  if (!tensors.contains("data"))
    throw UsageError(
        text("LMDB: the record has no tensor 'data'; pass LmdbDataset a function that decodes its records"));
  return detail::Packing<torch::data::Example<>>::batch(std::move(tensors));
}

void LmdbWriter::add(const torch::data::Example<>& sample) {
  add(to_safetensors(detail::Packing<torch::data::Example<>>::tensors(sample)));
}

}  // namespace lockstep
