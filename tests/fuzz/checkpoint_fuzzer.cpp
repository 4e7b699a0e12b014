// Feeds anything to the readers of checkpoint files: as a file, and as a pickle. The result is a value or one of
// lockstep's errors; a crash, another exception or a value that cannot be printed and written is a bug.

#include <cstdint>
#include <cstdlib>
#include <string>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/log.h"
#include "checkpoint/archive.h"
#include "checkpoint/files.h"
#include "checkpoint/pickle.h"
#include "checkpoint/safetensors.h"

// Only files that are written log warnings.
void lockstep::log_warning(const std::string&) {}

namespace {

using namespace lockstep;
using namespace lockstep::detail;

/// Runs a reader and uses what it returns.
template <class Read>
void use(const Read& read) {
  try {
    const Value value = read();
    if (value.to_string().size() > 200) std::abort();
    write_pickle(value);  // throws UsageError for objects
  } catch (const Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const MemorySource source(bytes);
  for (const bool verify : {true, false}) use([&] { return ArchiveReader(source).load({.verify = verify}); });
  use([&] {
    const PickleReader reader(bytes);
    return reader.value(
        [](const StorageClaim& claim) { return at::zeros({static_cast<int64_t>(claim.bytes % 4096)}, at::kByte); });
  });
  use([&] {
    auto dict = Value::dict();
    for (const auto& [name, tensor] : read_safetensors(source, c10::kCPU)) dict.items().emplace_back(name, tensor);
    return dict;
  });
  return 0;
}
