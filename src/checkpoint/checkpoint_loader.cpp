#include "checkpoint/checkpoint_loader.h"

#include "base/log.h"
#include "checkpoint/agree.h"
#include "checkpoint/shards.h"

namespace lockstep::detail {

void check_same_parts(const ProcessGroup& group, const TrainingState& state, const std::string& unit) {
  std::string names;
  run_and_agree(group, [&] {
    for (const auto& part : state.parts()) {
      if (part.name == kVersion || part.name == kMetrics || part.name == kWorldSize || part.name == kShards)
        throw UsageError(text("TrainingState: the name '", part.name, "' is used by CheckpointDirectory; rename it"));
      if (part.name == unit)
        throw UsageError(text("TrainingState: '", part.name, "' is the number that save() is called with and resume() ",
                              "returns; leave it out, rename it, or choose another unit for the directory"));
      names += text(names.empty() ? "" : ", ", part.name);
    }
  });
  const auto first = group.broadcast_object(names, 0).toStringRef();
  run_and_agree(group, [&] {
    if (names != first)
      throw UsageError(group.rank(), text("TrainingState: the parts are ", names, " here and ", first,
                                          " on rank 0; add the same parts in the same order on all ranks"));
  });
}

std::optional<Value> CheckpointLoader::find_intact(std::vector<std::string> names, int& damaged) const {
  for (;;) {
    std::string chosen;
    std::optional<Value> checkpoint;
    run_and_agree(group_, [&] {
      if (is_first()) checkpoint = read_first_intact(names, chosen, damaged);
    });
    chosen = group_.broadcast_object(chosen, 0).toStringRef();
    damaged = group_.broadcast(damaged, 0);
    if (chosen.empty()) return std::nullopt;
    // Rank 0 has compared the file with its checksums.
    run_and_agree(group_, [&] {
      if (!is_first()) checkpoint = load_checkpoint(in_folder(chosen), {.verify = false});
    });
    const auto wrong = verify_shards(shards_of(*checkpoint));
    if (wrong.empty()) return checkpoint;
    ++damaged;
    if (is_first()) log_warning(text("checkpoint ", in_folder(chosen), " is skipped: ", wrong));
  }
}

/// Loads the last checkpoint that is intact, and removes it and those after it from `names`.
std::optional<Value> CheckpointLoader::read_first_intact(std::vector<std::string>& names, std::string& chosen,
                                                         int& damaged) const {
  while (!names.empty()) {
    const auto name = names.back();
    names.pop_back();
    try {
      auto checkpoint = load_checkpoint(in_folder(name));
      checkpoint.at(unit_).as_int();
      chosen = name;
      return checkpoint;
    } catch (const SystemError&) {
      throw;  // the file may be intact
    } catch (const Error& error) {
      ++damaged;
      log_warning(text(error.what(), "; it is skipped"));
    }
  }
  return std::nullopt;
}

/// Returns, on all ranks, what is wrong with the shards; empty if nothing is. The ranks divide the files. Collective.
std::string CheckpointLoader::verify_shards(const std::vector<ShardFile>& shards) const {
  if (shards.empty()) return "";
  std::string wrong;
  run_and_agree(group_, [&] {
    for (size_t i = static_cast<size_t>(group_.rank()); i < shards.size() && wrong.empty();
         i += static_cast<size_t>(group_.size()))
      wrong = verify_shard(folder_, shards[i]);
  });
  for (const auto& of_rank : group_.all_gather_object(wrong))
    if (!of_rank.toStringRef().empty()) return of_rank.toStringRef();
  return "";
}

bool CheckpointLoader::has_entry(const Value& checkpoint, const std::string& name) const {
  if (checkpoint.contains(name)) return true;
  const auto shards = shards_of(checkpoint);
  return !shards.empty() &&
         load_shard(folder_, shards[0], {.map_location = c10::kMeta, .verify = false}).contains(name);
}

void CheckpointLoader::apply(const Value& checkpoint, const TrainingState& state) const {
  check_same_parts(group_, state, unit_);
  std::vector<std::string> missing;
  for (const auto& part : state.parts())  // loading a part may be collective
    run_and_agree(group_, [&] {
      about_part("loading", part.name, [&] {
        if (strict_ || has_entry(checkpoint, part.name))
          apply_part(part, checkpoint);
        else
          missing.push_back(part.name);
      });
    });
  if (is_first() && !missing.empty())
    log_warning(text("the checkpoint lacks ", enumerate(missing), ": these parts keep their values"));
  const auto saved = checkpoint.at(kWorldSize).as_int();
  if (is_first() && saved != group_.size())
    log_info(text("the checkpoint was saved by ", saved, " ranks and is continued by ", group_.size()));
}

void CheckpointLoader::apply_part(const StatePart& part, const Value& checkpoint) const {
  const auto shards = shards_of(checkpoint);
  if (!shards.empty() && !checkpoint.contains(part.name) && !part.is_per_rank) {
    const auto read = [&](size_t shard, const LoadOptions& options) {
      auto unverified = options;
      unverified.verify = false;  // verify_shards() has
      return load_shard(folder_, shards.at(shard), unverified).at(part.name);
    };
    if (part.load_shards) return part.load_shards(shards.size(), read);
    std::vector<Value> all;
    for (size_t i = 0; i < shards.size(); ++i) all.push_back(read(i, {}));
    return part.load(merge_shards(all), group_);
  }
  const auto& value = checkpoint.at(part.name);
  if (!part.is_per_rank) return part.load(value, group_);
  if (const auto rank = static_cast<size_t>(group_.rank()); rank < value.size())
    part.load(value.elements()[rank], group_);
}

}  // namespace lockstep::detail
