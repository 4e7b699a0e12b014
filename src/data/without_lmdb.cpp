// Compiled instead of lmdb.cpp if lockstep is built without LMDB. Every function throws UsageError.

#include <lockstep/error.h>
#include <lockstep/lmdb.h>

namespace lockstep {
namespace {

[[noreturn]] void refuse() {
  throw UsageError("this lockstep was built without LMDB; install liblmdb-dev and build it again");
}

}  // namespace

struct LmdbReader::State {};
LmdbReader::LmdbReader(const std::filesystem::path&, LmdbOptions) {
  refuse();
}
LmdbReader::~LmdbReader() = default;
size_t LmdbReader::size() const {
  refuse();
}
void LmdbReader::read(size_t, const std::function<void(std::string_view, std::string_view)>&) const {
  refuse();
}

struct LmdbWriter::State {};
LmdbWriter::LmdbWriter(std::filesystem::path) {
  refuse();
}
LmdbWriter::~LmdbWriter() = default;
void LmdbWriter::add(std::string_view) {
  refuse();
}
size_t LmdbWriter::size() const {
  refuse();
}
void LmdbWriter::finish() {
  refuse();
}

}  // namespace lockstep
