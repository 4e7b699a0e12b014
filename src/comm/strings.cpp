#include "comm/strings.h"

#include <cstring>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

// The device over which strings are sent.
c10::Device device_of(const ProcessGroup& group) {
  return group.supports(c10::kCPU) ? c10::Device(c10::kCPU) : group.device();
}

at::Tensor to_bytes(const std::string& text, c10::Device device) {
  auto bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  return bytes.to(device);
}

// Synchronizes first: after an aborted call the memory on a GPU must not be mistaken for a result.
at::Tensor read_back(const ProcessGroup& group, const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  group.synchronize();
  return tensor.cpu();
}

std::string to_string(const ProcessGroup& group, const at::Tensor& bytes) {
  auto local = read_back(group, bytes);
  return {static_cast<const char*>(local.data_ptr()), static_cast<size_t>(local.numel())};
}

// Allocates the output tensors.
std::vector<at::Tensor> room_for(const ProcessGroup& group, const at::Tensor& lengths) {
  std::vector<at::Tensor> parts;
  const auto known = read_back(group, lengths);
  for (int64_t rank = 0; rank < known.numel(); ++rank)
    parts.push_back(at::empty({known[rank].item<int64_t>()}, lengths.options().dtype(at::kByte)));
  return parts;
}

std::vector<std::string> to_strings(const ProcessGroup& group, const std::vector<at::Tensor>& parts) {
  std::vector<std::string> strings;
  for (const auto& part : parts) strings.push_back(to_string(group, part));
  return strings;
}

at::Tensor gather_lengths(const ProcessGroup& group, size_t length, const CallOptions& options) {
  auto lengths = at::empty({group.size()}, at::TensorOptions(at::kLong).device(device_of(group)));
  group.all_gather(lengths, at::full({1}, static_cast<int64_t>(length), lengths.options()), options);
  return lengths;
}

}  // namespace

std::vector<std::string> all_gather_strings(const ProcessGroup& group, const std::string& own,
                                            const CallOptions& options) {
  auto parts = room_for(group, gather_lengths(group, own.size(), options));
  group.all_gather(parts, to_bytes(own, device_of(group)), options);
  return to_strings(group, parts);
}

std::string broadcast_string(const ProcessGroup& group, const std::string& own, int root, const CallOptions& options) {
  auto length = at::full({1}, static_cast<int64_t>(own.size()), at::TensorOptions(at::kLong).device(device_of(group)));
  group.broadcast(length, root, options);
  auto bytes = group.rank() == root
                   ? to_bytes(own, device_of(group))
                   : at::empty({read_back(group, length).item<int64_t>()}, length.options().dtype(at::kByte));
  group.broadcast(bytes, root, options);
  return to_string(group, bytes);
}

std::vector<std::string> gather_strings(const ProcessGroup& group, const std::string& own, int root,
                                        const CallOptions& options) {
  auto lengths = gather_lengths(group, own.size(), options);
  auto parts = group.rank() == root ? room_for(group, lengths) : std::vector<at::Tensor>();
  group.gather(parts, to_bytes(own, device_of(group)), root, options);
  return to_strings(group, parts);
}

std::string scatter_strings(const ProcessGroup& group, const std::vector<std::string>& all, int root,
                            const CallOptions& options) {
  auto lengths = at::zeros({group.size()}, at::TensorOptions(at::kLong));
  std::vector<at::Tensor> parts;
  if (group.rank() == root)
    for (size_t r = 0; r < all.size(); ++r) {
      lengths[r] = static_cast<int64_t>(all[r].size());
      parts.push_back(to_bytes(all[r], device_of(group)));
    }
  lengths = lengths.to(device_of(group));
  group.broadcast(lengths, root, options);
  auto own_part =
      at::empty({read_back(group, lengths)[group.rank()].item<int64_t>()}, lengths.options().dtype(at::kByte));
  group.scatter(own_part, parts, root, options);
  return to_string(group, own_part);
}

void send_string(const ProcessGroup& group, const std::string& content, int dst, uint32_t tag,
                 const CallOptions& options) {
  const auto device = device_of(group);
  const auto length = at::full({1}, static_cast<int64_t>(content.size()), at::TensorOptions(at::kLong).device(device));
  group.exchange({Message::send(length, dst, tag), Message::send(to_bytes(content, device), dst, tag)}, options);
}

std::string recv_string(const ProcessGroup& group, int src, uint32_t tag, const CallOptions& options) {
  const auto length = at::empty({1}, at::TensorOptions(at::kLong).device(device_of(group)));
  group.recv(length, src, tag, options);
  const auto bytes = at::empty({length.item<int64_t>()}, length.options().dtype(at::kByte));
  group.recv(bytes, src, tag, options);
  return to_string(group, bytes);
}

}  // namespace lockstep
