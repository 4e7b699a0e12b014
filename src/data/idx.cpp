#include <lockstep/idx.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Deflate compresses data by at most this factor: a gzipped file that claims more is refused without reading it.
constexpr int64_t kMaxInflation = 1032;
constexpr size_t kChunkBytes = size_t{1} << 20;

// A file read through zlib, which passes plain files through unchanged.
class ByteSource {
 public:
  explicit ByteSource(const fs::path& file) : file_(file) {
    const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw SystemError(text("open ", file, ": ", std::strerror(errno), "; check the path"));
    struct stat status = {};
    if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) file_bytes_ = status.st_size;
    gz_ = ::gzdopen(fd, "rb");
    if (gz_ == nullptr) {
      ::close(fd);
      throw SystemError(text("gzdopen ", file, ": out of memory"));
    }
  }
  ~ByteSource() { ::gzclose_r(gz_); }
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  // Reads up to `bytes` bytes and returns how many; fewer only at the end of the file.
  size_t read(uint8_t* into, size_t bytes) {
    size_t done = 0;
    while (done < bytes) {
      const auto step = static_cast<unsigned>(std::min(bytes - done, kChunkBytes));
      const int got = ::gzread(gz_, into + done, step);
      if (got < static_cast<int>(step)) check_stream();
      if (got <= 0) break;
      done += static_cast<size_t>(got);
    }
    return done;
  }

  // Returns an upper bound on the bytes in the file; valid after the first read. Unlimited for a pipe.
  int64_t most_bytes() const {
    constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
    if (file_bytes_ < 0) return kUnknown;
    if (::gzdirect(gz_) == 1) return file_bytes_;
    return file_bytes_ > kUnknown / kMaxInflation ? kUnknown : file_bytes_ * kMaxInflation;
  }

 private:
  void check_stream() const {
    int code = Z_OK;
    const char* reason = ::gzerror(gz_, &code);
    if (code == Z_OK || code == Z_STREAM_END) return;
    if (code == Z_ERRNO) throw SystemError(text("read ", file_, ": ", std::strerror(errno)));
    if (code == Z_MEM_ERROR) throw SystemError(text("gzread ", file_, ": out of memory"));
    throw UsageError(
        text(file_, ": expected a complete gzip stream, but it is damaged (", reason, "); download it again"));
  }

  fs::path file_;
  int64_t file_bytes_ = -1;  // -1: not a regular file.
  gzFile gz_ = nullptr;
};

struct IdxHeader {
  at::ScalarType type = at::kByte;
  std::vector<int64_t> extents;
  int64_t data_bytes = 0;
};

at::ScalarType type_of_code(const fs::path& file, int code) {
  switch (code) {
    case 0x08:
      return at::kByte;
    case 0x09:
      return at::kChar;
    case 0x0B:
      return at::kShort;
    case 0x0C:
      return at::kInt;
    case 0x0D:
      return at::kFloat;
    case 0x0E:
      return at::kDouble;
    default:
      throw UsageError(text(file, ": type code ", code, ", expected 8, 9, 11, 12, 13 or 14; it is not an IDX file"));
  }
}

// Extents of zero count as one: a tensor's strides must not overflow either.
int64_t bytes_of_extents(const fs::path& file, const std::vector<int64_t>& extents, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  bool empty = false;
  for (const int64_t extent : extents) {
    empty = empty || extent == 0;
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes)) {
      throw UsageError(text(file, ": the extents ", enumerate(extents),
                            " multiply to more than 2^63 - 1 bytes, expected",
                            " less; the header is damaged: download the file again"));
    }
  }
  return empty ? 0 : bytes;
}

IdxHeader read_header(const fs::path& file, ByteSource& source) {
  std::array<uint8_t, 4> magic = {};
  const size_t magic_bytes = source.read(magic.data(), magic.size());
  if (magic_bytes < magic.size()) {
    throw UsageError(
        text(file, ": ends after ", magic_bytes, " bytes, expected the 4 of an IDX header; download it again"));
  }
  if (magic[0] != 0 || magic[1] != 0) {
    throw UsageError(text(file, ": starts with the bytes ", int{magic[0]}, " ", int{magic[1]},
                          ", expected 0 0; it is not an IDX file, plain or gzipped"));
  }
  IdxHeader header;
  header.type = type_of_code(file, magic[2]);
  const size_t rank = magic[3];
  std::vector<uint8_t> raw(rank * 4);
  const size_t raw_bytes = source.read(raw.data(), raw.size());
  if (raw_bytes < raw.size()) {
    throw UsageError(text(file, ": the header ends after ", magic_bytes + raw_bytes, " bytes, expected ",
                          magic_bytes + raw.size(), " for ", rank, " extents; download it again"));
  }
  for (size_t i = 0; i < raw.size(); i += 4) {
    header.extents.push_back(int64_t{raw[i]} << 24 | int64_t{raw[i + 1]} << 16 | int64_t{raw[i + 2]} << 8 | raw[i + 3]);
  }
  header.data_bytes = bytes_of_extents(file, header.extents, static_cast<int64_t>(c10::elementSize(header.type)));
  return header;
}

std::vector<uint8_t> read_data(const fs::path& file, ByteSource& source, const IdxHeader& header) {
  const auto expected = static_cast<size_t>(header.data_bytes);
  if (header.data_bytes > source.most_bytes()) {
    throw UsageError(text(file, ": the header announces ", expected, " bytes of data, the file can hold at most ",
                          source.most_bytes(), "; it is damaged or truncated: download it again"));
  }
  std::vector<uint8_t> data;
  while (data.size() < expected) {
    const size_t before = data.size();
    const size_t step = std::min(expected - before, std::max(before, kChunkBytes));  // Double, so copying stays cheap.
    data.resize(before + step);
    const size_t got = source.read(data.data() + before, step);
    if (got < step) {
      throw UsageError(text(file, ": ends after ", before + got, " bytes of data, expected ", expected,
                            "; it is truncated: download it again"));
    }
  }
  // Reading past the end also makes zlib compare the checksum.
  uint8_t extra = 0;
  if (source.read(&extra, 1) != 0) {
    throw UsageError(text(file, ": has more than the ", expected, " bytes of data that the header announces, expected",
                          " the end of the file; download it again"));
  }
  return data;
}

void big_endian_to_native(std::vector<uint8_t>& data, size_t element_bytes) {
  if (std::endian::native == std::endian::big || element_bytes == 1) return;
  for (auto first = data.begin(); first != data.end(); first += static_cast<std::ptrdiff_t>(element_bytes)) {
    std::reverse(first, first + static_cast<std::ptrdiff_t>(element_bytes));
  }
}

constexpr const char* kPackagedData = "/usr/share/datasets";
constexpr std::array<const char*, 4> kDatasetFiles = {"train-images-idx3-ubyte", "train-labels-idx1-ubyte",
                                                      "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"};

// Returns the file, or the gzipped file if only that exists.
fs::path plain_or_gzipped(const fs::path& file) {
  fs::path gzipped = file;
  gzipped += ".gz";
  std::error_code ignored;
  return !fs::exists(file, ignored) && fs::exists(gzipped, ignored) ? gzipped : file;
}

bool has_dataset(const fs::path& folder) {
  std::error_code ignored;
  return std::all_of(kDatasetFiles.begin(), kDatasetFiles.end(),
                     [&](const char* name) { return fs::exists(plain_or_gzipped(folder / name), ignored); });
}

at::Tensor read_bytes(const fs::path& folder, const std::string& name, int64_t rank) {
  const fs::path file = plain_or_gzipped(folder / name);
  std::error_code ignored;
  if (!fs::exists(file, ignored)) {
    throw UsageError(text("expected ", file,
                          " or the same with .gz, found neither; pass the folder that contains the dataset's files, ",
                          "or use lockstep::find_dataset"));
  }
  at::Tensor tensor = read_idx(file);
  if (tensor.scalar_type() != at::kByte || tensor.dim() != rank) {
    throw UsageError(text(file, ": ", tensor.dim(), " extents of type ", tensor.scalar_type(), ", expected ", rank,
                          " of type Byte; images have 3 extents, labels 1"));
  }
  return tensor;
}

}  // namespace

at::Tensor read_idx(const fs::path& file) {
  ByteSource source(file);
  const IdxHeader header = read_header(file, source);
  std::vector<uint8_t> data = read_data(file, source, header);
  big_endian_to_native(data, c10::elementSize(header.type));
  at::Tensor tensor = at::empty(header.extents, header.type);
  if (!data.empty()) std::memcpy(tensor.data_ptr(), data.data(), data.size());
  return tensor;
}

fs::path find_dataset(const std::string& name) {
  if (name.empty() || name.find('/') != std::string::npos) {
    throw UsageError(text("find_dataset('", name,
                          "'): expected a plain name such as 'fashion-mnist'; pass a folder to ",
                          "IdxDataset directly"));
  }
  std::vector<fs::path> candidates;
  if (const char* root = std::getenv("LOCKSTEP_DATA"); root != nullptr && *root != '\0') {
    candidates = {fs::path(root) / name, fs::path(root)};
  }
  candidates.push_back(fs::path(kPackagedData) / name);
  for (const fs::path& folder : candidates) {
    if (has_dataset(folder)) return folder;
  }
  const std::string package = name == "fashion-mnist" ? "apt-get install dataset-fashion-mnist, or " : "";
  throw UsageError(text("dataset '", name, "' is not in ", enumerate(candidates), "; ", package,
                        "set LOCKSTEP_DATA to a folder with its four files: ", enumerate(kDatasetFiles),
                        ", each plain or with .gz"));
}

IdxDataset::IdxDataset(const fs::path& folder, Split split) {
  const std::string prefix = split == Split::kTrain ? "train" : "t10k";
  const at::Tensor images = read_bytes(folder, prefix + "-images-idx3-ubyte", 3);
  const at::Tensor labels = read_bytes(folder, prefix + "-labels-idx1-ubyte", 1);
  if (images.size(0) != labels.size(0)) {
    throw UsageError(text(folder, ": ", images.size(0), " ", prefix, " images and ", labels.size(0),
                          " labels, expected equal numbers; the files belong to different datasets"));
  }
  images_ = images.unsqueeze(1).to(at::kFloat).div_(255);
  targets_ = labels.to(at::kLong);
}

IdxDataset::~IdxDataset() = default;

void IdxDataset::check_index(size_t index) const {
  const auto count = static_cast<size_t>(targets_.size(0));
  if (index >= count) {
    throw UsageError(text("IdxDataset: index ", index, ", expected less than ", count, "; check the sampler's size"));
  }
}

torch::data::Example<> IdxDataset::get(size_t index) {
  check_index(index);
  const auto i = static_cast<int64_t>(index);
  return {images_.select(0, i), targets_.select(0, i)};
}

torch::data::Example<> IdxDataset::gather(torch::ArrayRef<size_t> indices) const {
  auto rows = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  auto* row = rows.data_ptr<int64_t>();
  for (size_t index : indices) {
    check_index(index);
    *row++ = static_cast<int64_t>(index);
  }
  return {images_.index_select(0, rows), targets_.index_select(0, rows)};
}

torch::optional<size_t> IdxDataset::size() const {
  return static_cast<size_t>(targets_.size(0));
}

const at::Tensor& IdxDataset::images() const {
  return images_;
}

const at::Tensor& IdxDataset::targets() const {
  return targets_;
}

}  // namespace lockstep
