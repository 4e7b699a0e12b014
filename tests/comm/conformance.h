#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "comm/oracle.h"
#include "support/ranks.h"

/// The cases of the conformance suite: every backend with several numbers of ranks and all dtypes.

namespace lockstep {

struct Case {
  std::string backend;
  int size;
  at::ScalarType dtype;
};

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.backend << ", " << c.size << " ranks, " << at::toString(c.dtype);
}

inline bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.cpu(), b.cpu());
}

/// The ranks of a case, and tensors where they have theirs.
class OnEveryRank : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (device().is_cuda() && !at::hasCUDA()) GTEST_SKIP() << "backend nccl: this machine has no GPU";
  }
  void on_every_rank(const std::function<void(ProcessGroup)>& body) {
    ::on_every_rank(GetParam().backend, GetParam().size, body, device());
  }
  c10::Device device() const { return GetParam().backend == "nccl" ? c10::Device(c10::kCUDA, 0) : c10::kCPU; }
  at::Tensor here(const at::Tensor& tensor) const { return tensor.to(device()); }
};

/// The same with tensors of the dtype of the case.
class ConformanceCase : public OnEveryRank {
 protected:
  int size() const { return GetParam().size; }
  at::Tensor mine(int rank, at::IntArrayRef sizes, uint64_t key = 0) const {
    return here(values_of(rank, GetParam().dtype, sizes, key));
  }
  std::vector<at::Tensor> all(at::IntArrayRef sizes, uint64_t key = 0) const {
    return values_of_all(size(), GetParam().dtype, sizes, key);
  }
  at::Tensor blank(at::IntArrayRef sizes) const { return here(at::zeros(sizes, GetParam().dtype)); }
};

inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  auto backends = backends_under_test();
#ifdef LOCKSTEP_HAVE_GLOO
  backends.push_back("hierarchical");
#endif
#ifdef LOCKSTEP_HAVE_NCCL
  backends.push_back("nccl");
#endif
  for (const auto& backend : backends)
    for (int size : {1, 2, 3, 4, 7})
      for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt,
                         at::kLong, at::kBool})
        cases.push_back({backend, size, dtype});
  return cases;
}

inline std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  return info.param.backend + "_" + std::to_string(info.param.size) + "_" + at::toString(info.param.dtype);
}

/// One dtype for each number of ranks.
inline std::vector<Case> once_cases() {
  std::vector<Case> cases;
  for (const auto& c : all_cases())
    if (c.dtype == at::kFloat) cases.push_back(c);
  return cases;
}

}  // namespace lockstep
