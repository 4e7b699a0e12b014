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

// On the ranks where they arrive.
std::vector<at::Tensor> room_for(const at::Tensor& lengths) {
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < lengths.numel(); ++rank)
    parts.push_back(at::empty({lengths[rank].item<int64_t>()}, lengths.options().dtype(at::kByte)));
  return parts;
}

std::vector<std::string> to_strings(const std::vector<at::Tensor>& parts) {
  std::vector<std::string> strings;
  for (const auto& part : parts) strings.push_back(to_string(part));
  return strings;
}

at::Tensor gather_lengths(const ProcessGroup& group, size_t mine, const CallOptions& options) {
  auto lengths = at::empty({group.size()}, at::TensorOptions(at::kLong).device(group.device()));
  group.all_gather(lengths, at::full({1}, static_cast<int64_t>(mine), lengths.options()), options);
  return lengths;
}

}  // namespace

std::vector<std::string> all_gather_strings(const ProcessGroup& group, const std::string& mine,
                                            const CallOptions& options) {
  auto parts = room_for(gather_lengths(group, mine.size(), options));
  group.all_gather(parts, to_bytes(mine, group.device()), options);
  return to_strings(parts);
}

std::string broadcast_string(const ProcessGroup& group, const std::string& mine, int root, const CallOptions& options) {
  auto length = at::full({1}, static_cast<int64_t>(mine.size()), at::TensorOptions(at::kLong).device(group.device()));
  group.broadcast(length, root, options);
  auto bytes = group.rank() == root ? to_bytes(mine, group.device())
                                    : at::empty({length.item<int64_t>()}, length.options().dtype(at::kByte));
  group.broadcast(bytes, root, options);
  return to_string(bytes);
}

std::vector<std::string> gather_strings(const ProcessGroup& group, const std::string& mine, int root,
                                        const CallOptions& options) {
  auto lengths = gather_lengths(group, mine.size(), options);
  auto parts = group.rank() == root ? room_for(lengths) : std::vector<at::Tensor>();
  group.gather(parts, to_bytes(mine, group.device()), root, options);
  return to_strings(parts);
}

std::string scatter_strings(const ProcessGroup& group, const std::vector<std::string>& all, int root,
                            const CallOptions& options) {
  auto lengths = at::zeros({group.size()}, at::TensorOptions(at::kLong));
  std::vector<at::Tensor> parts;
  if (group.rank() == root)
    for (size_t r = 0; r < all.size(); ++r) {
      lengths[r] = static_cast<int64_t>(all[r].size());
      parts.push_back(to_bytes(all[r], group.device()));
    }
  lengths = lengths.to(group.device());
  group.broadcast(lengths, root, options);
  auto mine = at::empty({lengths[group.rank()].item<int64_t>()}, lengths.options().dtype(at::kByte));
  group.scatter(mine, parts, root, options);
  return to_string(mine);
}

}  // namespace lockstep
