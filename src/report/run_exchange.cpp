#include "report/run_exchange.h"

#include <algorithm>
#include <array>
#include <vector>

#include <ATen/ATen.h>

#include "report/non_finite.h"

namespace lockstep::detail {
namespace {

constexpr std::chrono::duration<double> kBetweenExchanges{0.2};
constexpr int64_t kMaxSteps = 100'000;  // between exchanges

}  // namespace

int64_t RunExchange::propose_steps() const {
  const double between = std::max(1e-9, std::chrono::duration<double>(Clock::now() - last_).count());
  const double fitting =
      static_cast<double>(std::max<int64_t>(steps_since_, 1)) * (kBetweenExchanges.count() / between);
  const auto most = std::min(kMaxSteps, 2 * steps_until_);  // the first steps are slow
  return std::clamp(static_cast<int64_t>(std::min(fitting, 1e9)), int64_t{1}, most);
}

RunExchange::Agreed RunExchange::run(const Message& own) {
  const bool is_first = group_.rank() == 0;
  const std::array<int64_t, 5> numbers{own.is_signalled, is_first && own.is_save_due, own.samples,
                                       is_first ? propose_steps() : 0, own.non_finite.has_value()};
  const auto device = group_.supports(c10::kCPU) ? c10::Device(c10::kCPU) : group_.device();
  const auto sums = at::tensor(c10::ArrayRef<int64_t>(numbers), at::kLong).to(device);
  group_.all_reduce(sums);
  const auto all = sums.cpu();
  const auto* sum = all.data_ptr<int64_t>();
  Agreed agreed{.stops = sum[0] > 0, .saves = sum[1] > 0, .samples = sum[2]};
  steps_until_ = sum[3];
  steps_since_ = 0;
  last_ = Clock::now();
  if (sum[4] == 0) return agreed;
  std::vector<std::vector<std::string>> descriptions;
  for (const auto& text : group_.all_gather_object(own.non_finite.value_or(""))) {
    descriptions.emplace_back();
    if (!text.toStringRef().empty()) descriptions.back().push_back(text.toStringRef());
  }
  agreed.non_finite = join_by_rank(descriptions);
  return agreed;
}

}  // namespace lockstep::detail
