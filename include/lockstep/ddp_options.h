#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace lockstep {

/// Sizes of gradient buckets.
struct BucketLimits {
  /// The first bucket is small, so that its all-reduce starts early in backward. On a GPU, a model whose gradients
  /// total at most twice this size uses one bucket.
  int64_t first_bytes = 1 << 20;
  int64_t cap_bytes = 25 << 20;
  /// The last bucket is small, because backward has ended when its all-reduce starts. It has the gradients that become
  /// ready last, at most about this size, or a single gradient.
  int64_t last_bytes = 1 << 20;
};

/// The gradients that are reduced together, as indices into the list of parameters.
struct BucketPlan {
  std::vector<std::vector<size_t>> buckets;  ///< in the order in which they are expected to fill

  friend bool operator==(const BucketPlan&, const BucketPlan&) = default;
};

/// Options that affect communication must match on all ranks: broadcast_buffers, find_unused_parameters, static_graph,
/// reduce_dtype, densify_sparse_gradients, sparse_parameters, check_finite, check_replicas_every and buckets. The
/// constructor throws MismatchError if they differ, unless init_sync is false.
struct DistributedDataParallelOptions {
  /// In training mode, copies rank 0's buffers (running statistics and the like) to all ranks before the first forward
  /// of each step.
  bool broadcast_buffers = true;
  /// Allows parameters without a gradient. The gradient of such a parameter counts as zero on that rank; a parameter
  /// without a gradient on all ranks keeps its old gradient. If false, a parameter without a gradient on any rank is a
  /// UsageError on every rank. On a GPU, a rank that used all parameters itself may throw this error some steps later.
  bool find_unused_parameters = false;
  /// Promises that every backward uses the same parameters in the same way as the first backward, which is recorded.
  /// Parameters may then be unused, and may get several gradients in one backward, as with activation checkpointing of
  /// segments that share parameters.
  bool static_graph = false;
  /// If true, `.grad()` is a view of bucket memory. If false, `.grad()` is a separate tensor, which costs two copies of
  /// it in each step.
  bool gradient_as_bucket_view = true;
  /// On a CPU, lets backward compute large gradients directly in bucket memory, which saves a copy in each step. For
  /// this the wrapper replaces LibTorch's CPU allocator, for the whole process and for good, by one that forwards all
  /// other allocations to the previous one. Needs gradient_as_bucket_view. The environment variable
  /// LOCKSTEP_IN_PLACE_GRADIENTS=0 switches it off for a whole program, for debugging.
  bool in_place_gradients = true;
  /// Compares the models and options of all ranks at construction and copies rank 0's parameters and buffers to all
  /// ranks. If false, neither is done: the ranks must already hold equal models and options.
  bool init_sync = true;
  BucketLimits buckets{};
  /// Names of parameters and buffers that the wrapper ignores: each rank keeps its own values.
  std::vector<std::string> ignore{};
  /// Empty, or the model's device. If set, forward copies its tensor arguments to this device.
  std::vector<c10::Device> device_ids{};
  /// Device to which forward moves the tensors that it returns. Default: they stay where they are.
  std::optional<c10::Device> output_device{};
  /// Checks all gradients for NaN and infinity in each backward. If it finds any, throws an Error that names the rank
  /// and the parameter, on every rank. Costs one pass over the gradients.
  bool check_finite = false;
  /// Dtype in which gradients are reduced. Default: that of the parameter. For example float32 for bfloat16 parameters,
  /// so that the sum over many ranks is not rounded, or bfloat16 for float32 parameters, which halves the bytes sent. A
  /// gradient of another dtype is converted, which costs one copy each step. Complex and sparse gradients keep their
  /// dtype.
  std::optional<c10::ScalarType> reduce_dtype{};
  /// Sparse gradients (Embedding with the option sparse) stay sparse: each rank sends the rows that it has, and .grad()
  /// is a sparse tensor with the rows of all ranks. If true, they are converted and reduced with the dense gradients,
  /// which is faster if a step uses most of the rows. Comm hooks get dense gradients only.
  bool densify_sparse_gradients = false;
  /// Names of further parameters with sparse gradients, besides the weights of Embedding and EmbeddingBag layers whose
  /// option sparse is set. For TorchScript and functions.
  std::vector<std::string> sparse_parameters{};
  /// Interval, in training forwards outside of no_sync(), at which check_replicas() runs automatically. 0: never.
  int64_t check_replicas_every = 0;
};

}  // namespace lockstep
