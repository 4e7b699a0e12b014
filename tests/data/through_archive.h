#pragma once

#include <sstream>

#include <torch/serialize/archive.h>

namespace lockstep {

/// Saves one and loads the other from it.
template <class Saved, class Loaded>
void through_archive(const Saved& saved, Loaded& loaded) {
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  saved.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  loaded.load(in);
}

}  // namespace lockstep
