#pragma once

#include <ostream>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/value.h>
#include <lockstep/weight_average.h>

namespace lockstep::detail {

/// The properties of a tensor that an average depends on.
struct TensorKind {
  explicit TensorKind(const at::Tensor& tensor)
      : dtype(tensor.scalar_type()), sizes(tensor.sizes().vec()), device(tensor.device()) {}

  bool describes(const at::Tensor& tensor) const {
    return tensor.scalar_type() == dtype && tensor.sizes() == at::IntArrayRef(sizes) && tensor.device() == device;
  }
  friend std::ostream& operator<<(std::ostream& out, const TensorKind& kind) {
    return out << python_name(kind.dtype) << " " << at::IntArrayRef(kind.sizes) << " on " << kind.device;
  }

  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  c10::Device device;
};

/// State that a WeightAverage and its guard share. Members without the comment "changes" are constant after
/// construction.
class AverageState {
 public:
  AverageState(torch::nn::Module& model, AveragingRule rule, const WeightAverageOptions& options);

  void update();
  void apply();
  void restore();
  void copy_to_model();
  int64_t updates() const { return count_.item<int64_t>(); }
  Value state_dict() const;
  void load(const Value& dict);

 private:
  /// A name of the model, and what it referred to at construction.
  struct Entry {
    std::string name;
    size_t slot;
    TensorKind kind;
  };
  /// A tensor of the model, which may have several names.
  struct Slot {
    at::Tensor weight;
    at::Tensor average;
    bool is_buffer;
  };
  /// Slots that are averaged together, on one device and with one dtype of weights.
  struct Batch {
    std::vector<at::Tensor> weights, averages;
  };

  bool knows(const std::string& name) const;
  bool knows_at(size_t place, const std::string& name) const {
    return place < entries_.size() && entries_[place].name == name;
  }
  void check_model() const;
  void refuse_capture(const char* call) const;
  void refuse_shared(const char* call) const;
  void check_has_average(const char* call) const;
  void mix(const Batch& batch) const;

  torch::nn::Module& model_;
  const AveragingRule rule_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;
  std::vector<Batch> averaged_;
  Batch copied_;                         // copied from the model at each update, not averaged
  std::vector<at::Tensor> all_weights_;  // of all slots, in order
  std::vector<at::Tensor> all_averages_;
  at::Tensor count_;                // of updates, on the device: a captured update changes it. Its contents change.
  bool has_average_ = false;        // changes: count_ is not 0
  bool is_applied_ = false;         // changes
  std::vector<at::Tensor> backup_;  // changes: the model's own weights while the averages are applied
};

}  // namespace lockstep::detail
