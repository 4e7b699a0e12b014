#include "comm/strings.h"

#include <cstring>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

at::Tensor to_bytes(const std::string& text, c10::Device device) {
  auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes.to(device);
}

std::string to_string(const at::Tensor& bytes) {
  auto local = bytes.cpu();
  return {static_cast<const char*>(local.data_ptr()), static_cast<size_t>(local.numel())};
}

}  // namespace

std::vector<std::string> all_gather_strings(const ProcessGroup& group, const std::string& mine) {
  auto lengths = at::empty({group.size()}, at::TensorOptions(at::kLong).device(group.device()));
  group.all_gather(lengths, at::full({1}, static_cast<int64_t>(mine.size()), lengths.options()));

  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank)
    parts.push_back(at::empty({lengths[rank].item<int64_t>()}, lengths.options().dtype(at::kByte)));
  group.all_gather(parts, to_bytes(mine, group.device()));

  std::vector<std::string> strings;
  for (const auto& part : parts) strings.push_back(to_string(part));
  return strings;
}

std::string broadcast_string(const ProcessGroup& group, const std::string& mine, int root) {
  auto length = at::full({1}, static_cast<int64_t>(mine.size()), at::TensorOptions(at::kLong).device(group.device()));
  group.broadcast(length, root);
  auto bytes = group.rank() == root ? to_bytes(mine, group.device())
                                    : at::empty({length.item<int64_t>()}, length.options().dtype(at::kByte));
  group.broadcast(bytes, root);
  return to_string(bytes);
}

}  // namespace lockstep
