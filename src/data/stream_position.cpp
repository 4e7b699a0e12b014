#include "data/stream_position.h"

#include <algorithm>
#include <string>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {
namespace {

// A rank's position as numbers: these, then the samples of each of its parts and whether the part has ended.
enum { kEpoch, kSteps, kIsFinished, kFirstPart };

at::Tensor as_numbers(const StreamPosition& position) {
  std::vector<int64_t> numbers{position.epoch, position.steps, position.is_finished};
  for (const auto& part : position.parts) {
    numbers.push_back(part.samples);
    numbers.push_back(part.has_ended);
  }
  return at::tensor(numbers, at::kLong);
}

std::vector<at::Tensor> gather_numbers(const ProcessGroup& group, const at::Tensor& own) {
  if (group.size() == 1) return {own};
  std::vector<at::Tensor> all;
  for (const auto& each : group.all_gather_object(c10::IValue(own))) all.push_back(each.toTensor());
  return all;
}

[[noreturn]] void refuse_state(int rank, const std::string& what) {
  throw UsageError(rank, text("StreamLoader: the state ", what,
                              ", expected a state that StreamLoader::state_dict returned; load the loader's entry"));
}

// Returns the numbers or booleans of a list that must have `count` elements, or any number of them with -1.
std::vector<int64_t> read_list(const Value& state, const char* key, int64_t count, int rank) {
  std::vector<int64_t> numbers;
  for (const auto& element : state.at(key).elements())
    numbers.push_back(element.is(Value::Kind::kBool) ? element.as_bool() : element.as_int());
  if (numbers.empty() || (count >= 0 && static_cast<int64_t>(numbers.size()) != count))
    refuse_state(rank, text("has ", numbers.size(), " numbers in '", key, "' of ", count, " parts"));
  if (*std::min_element(numbers.begin(), numbers.end()) < 0) refuse_state(rank, text("has a negative '", key, "'"));
  return numbers;
}

void check_same_layout(int rank, const char* what, int64_t saved, int64_t own) {
  if (saved != own)
    throw UsageError(
        rank, text("StreamLoader: the saved position is inside an epoch with ", what, " ", saved, ", this loader has ",
                   what, " ", own, "; set ", what, " to ", saved, ", or resume from the end of an epoch"));
}

}  // namespace

std::optional<size_t> next_part(c10::ArrayRef<PartPosition> parts, int64_t batch_size) {
  std::optional<size_t> next;
  int64_t fewest = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].has_ended) continue;
    const int64_t batches = (parts[i].samples + batch_size - 1) / batch_size;
    if (next && batches >= fewest) continue;
    next = i;
    fewest = batches;
  }
  return next;
}

Value save_position(const ProcessGroup& group, const StreamPosition& position, const StreamLayout& layout) {
  const auto all = gather_numbers(group, as_numbers(position));
  const auto number = [&](size_t rank, size_t which) { return all[rank].data_ptr<int64_t>()[which]; };
  const size_t ranks = all.size();
  bool is_finished = true;
  std::vector<Value> steps, samples, ended;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (all[rank].numel() != all[0].numel())
      throw MismatchError(text("StreamLoader: state_dict() with different parts: rank 0 reads ",
                               (all[0].numel() - kFirstPart) / 2, ", rank ", rank, " reads ",
                               (all[rank].numel() - kFirstPart) / 2, "; use the same options on all ranks"));
    if (number(rank, kEpoch) != number(0, kEpoch))
      throw MismatchError(text("StreamLoader: state_dict() in different epochs: rank 0 is in epoch ", number(0, kEpoch),
                               ", rank ", rank, " in epoch ", number(rank, kEpoch),
                               "; call set_epoch() with the same number on all ranks"));
    is_finished = is_finished && number(rank, kIsFinished) != 0;
    steps.emplace_back(number(rank, kSteps));
  }
  for (size_t part = 0; part < static_cast<size_t>(layout.parts); ++part) {
    const size_t at = kFirstPart + 2 * (part / ranks);
    samples.emplace_back(number(part % ranks, at));
    ended.emplace_back(number(part % ranks, at + 1) != 0);
  }
  return Value::dict({{"epoch", position.epoch},
                      {"finished", is_finished},
                      {"parts", layout.parts},
                      {"batch_size", layout.batch_size},
                      {"seed", layout.seed},
                      {"steps", Value::list(std::move(steps))},
                      {"samples", Value::list(std::move(samples))},
                      {"ended", Value::list(std::move(ended))}});
}

StreamPosition load_position(const Value& state, int rank, int ranks, const StreamLayout& layout) {
  StreamPosition position{.epoch = state.at("epoch").as_int(), .is_finished = state.at("finished").as_bool()};
  const int64_t parts = state.at("parts").as_int();
  if (position.epoch < 0) refuse_state(rank, text("has epoch ", position.epoch));
  const auto steps = read_list(state, "steps", -1, rank);
  const auto samples = read_list(state, "samples", parts, rank);
  const auto ended = read_list(state, "ended", parts, rank);
  const auto is_zero = [](int64_t number) { return number == 0; };
  const bool is_inside = !position.is_finished && !(std::all_of(samples.begin(), samples.end(), is_zero) &&
                                                    std::all_of(ended.begin(), ended.end(), is_zero));
  position.parts.resize(static_cast<size_t>(layout.parts / ranks));
  if (!is_inside) return position;

  check_same_layout(rank, "parts", parts, layout.parts);
  check_same_layout(rank, "batch_size", state.at("batch_size").as_int(), layout.batch_size);
  check_same_layout(rank, "seed", state.at("seed").as_int(), layout.seed);
  for (size_t i = 0; i < position.parts.size(); ++i) {
    const size_t part = static_cast<size_t>(rank) + i * static_cast<size_t>(ranks);
    position.parts[i] = {.samples = samples[part], .has_ended = ended[part] != 0};
  }
  // A different number of ranks continues after the step of the rank that was furthest ahead.
  position.steps = steps.size() == static_cast<size_t>(ranks) ? steps[static_cast<size_t>(rank)]
                                                              : *std::max_element(steps.begin(), steps.end());
  return position;
}

}  // namespace lockstep::detail
