#include "bench/training_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/error.h>

namespace lockstep::bench {
void refuse_message_options(const Request& request) {
  const std::pair<const char*, bool> kForMessages[] = {
      {"--min", !request.least.empty()},    {"--max", !request.most.empty()},    {"--factor", request.factor != 0},
      {"--sizes", !request.sizes.empty()},  {"--dtype", !request.dtype.empty()}, {"--op", !request.redop.empty()},
      {"--memory", !request.memory.empty()}};
  std::vector<std::string> said;
  for (const auto& [option, is_said] : kForMessages)
    if (is_said) said.emplace_back(option);
  if (!said.empty())
    throw UsageError(fmt::format("{} trains models, it has no messages to choose: leave out {}", request.operation,
                                 fmt::join(said, ", ")));
  if (!request.against.empty() && request.against != "python")
    throw UsageError(fmt::format("--against is \"{}\": it should be python, or left out", request.against));
}

std::vector<std::string> choose_models(const std::vector<std::string>& wanted, const std::vector<std::string>& known) {
  if (wanted.empty()) return known;
  std::vector<std::string> chosen;
  for (const auto& name : wanted) {
    if (!has(known, name))
      throw UsageError(
          fmt::format("--models: there is no '{}' to train; it should be among {}", name, fmt::join(known, ", ")));
    if (has(chosen, name)) throw UsageError(fmt::format("--models names '{}' twice: once is enough", name));
    chosen.push_back(name);
  }
  return chosen;
}

}  // namespace lockstep::bench
