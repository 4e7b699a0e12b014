#include <malloc.h>
#include <openssl/evp.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <limits>
#include <string>

#include <ATen/Parallel.h>
#include <torch/types.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>

#include <lockstep/checkpoint_directory.h>
#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "bench/ranks/checkpoint_state.h"

namespace lockstep::bench {
namespace {

using nlohmann::json;

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// The speed of one thread in GB/s, the best of three passes over memory that exceeds the caches.
double speed_of(const std::function<void(const std::string&)>& pass) {
  const std::string bytes(64 << 20, 'x');
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; ++i) least = std::min(least, seconds_of([&] { pass(bytes); }));
  return static_cast<double>(bytes.size()) / least / 1e9;
}

double sha256_speed() {
  return speed_of([](const std::string& bytes) {
    unsigned char digest[EVP_MAX_MD_SIZE];
    if (EVP_Digest(bytes.data(), bytes.size(), digest, nullptr, EVP_sha256(), nullptr) != 1)
      throw SystemError("OpenSSL has no SHA-256: EVP_Digest failed");
  });
}

double crc32_speed() {
  return speed_of([](const std::string& bytes) {
    [[maybe_unused]] const volatile auto crc = ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  });
}

/// Executes requests. Memory that earlier requests have freed is returned to the system first, so that each request
/// gets new memory, as in a process that has just started.
class CheckpointServer {
 public:
  explicit CheckpointServer(const CheckpointPlan& plan) : plan_(plan), state_(plan) {}

  json answer(const std::string& request) {
    const auto space = request.find(' ');
    const auto command = request.substr(0, space), path = request.substr(space + 1);
    ::malloc_trim(0);
    if (command == "save") return {{"seconds", seconds_of([&] { save_checkpoint(path, state_.value()); })}};
    if (command == "load") return load(path, {.verify = true});
    if (command == "load-unverified") return load(path, {.verify = false});
    if (command == "stall") return stall(path);
    throw UsageError("unknown request " + request);
  }

 private:
  json load(const std::string& path, const LoadOptions& options) const {
    Value loaded;
    const double seconds = seconds_of([&] { loaded = load_checkpoint(path, options); });
    return {{"seconds", seconds}, {"wrong", plan_.check ? state_.count_wrong(loaded) : 0}};
  }

  json stall(const std::string& folder) {
    const auto state = state_.training_state();
    CheckpointDirectory checkpoints(world_, folder,
                                    {.keep_last = 1, .asynchronous = true, .on_error = OnSaveError::kThrow});
    // Each save ends before the next begins: only the time in save() counts.
    const double first = seconds_of([&] { checkpoints.save(0, state); });
    checkpoints.wait();
    const double copy = copy_state();
    const double later = seconds_of([&] { checkpoints.save(1, state); });
    checkpoints.wait();
    const int64_t wrong = plan_.check ? state_.count_wrong(load_checkpoint(checkpoints.path(1))) : 0;
    return {{"first", first}, {"copy", copy}, {"later", later}, {"wrong", wrong}};
  }

  /// Copies into memory that exists already.
  double copy_state() {
    const auto tensors = state_.tensors();
    if (copies_.empty())
      for (const auto& tensor : tensors) copies_.push_back(torch::zeros_like(tensor));
    const at::NoGradGuard no_grad;
    return seconds_of([&] {
      for (size_t i = 0; i < tensors.size(); ++i) copies_[i].copy_(tensors[i]);
    });
  }

  const CheckpointPlan plan_;
  CheckpointState state_;
  const ProcessGroup world_ = init_process_group({.rank = 0, .world_size = 1, .device = c10::Device(c10::kCPU)});
  std::vector<at::Tensor> copies_;
};

}  // namespace

void serve_checkpoints(const CheckpointPlan& plan) {
  at::set_num_threads(plan.threads);
  CheckpointServer server(plan);
  std::cout << json{{"torch", TORCH_VERSION}, {"sha256_gbps", sha256_speed()}, {"crc32_gbps", crc32_speed()}}.dump()
            << std::endl;
  for (std::string request; std::getline(std::cin, request);) std::cout << server.answer(request).dump() << std::endl;
}

}  // namespace lockstep::bench
