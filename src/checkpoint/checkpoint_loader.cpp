#include "checkpoint/checkpoint_loader.h"

#include <algorithm>

#include "base/log.h"
#include "checkpoint/archive.h"
#include "checkpoint/digest.h"
#include "checkpoint/shards.h"
#include "comm/run_and_agree.h"

namespace lockstep::detail {
namespace {

/// "rank 3", "ranks 0 and 2".
std::string describe_ranks(const std::vector<int>& ranks) {
  return text(ranks.size() == 1 ? "rank " : "ranks ", enumerate(ranks));
}

/// Describes the damage of a checkpoint that each rank has found; empty if no rank has found any.
std::string describe_damage(const std::vector<std::string>& damage) {
  std::vector<int> damaged, intact;
  for (size_t rank = 0; rank < damage.size(); ++rank)
    (damage[rank].empty() ? intact : damaged).push_back(static_cast<int>(rank));
  if (damaged.empty()) return "";
  const auto& first = damage[static_cast<size_t>(damaged[0])];
  if (intact.empty()) return first;
  return text(first, ", on ", describe_ranks(damaged), ", but not on ", describe_ranks(intact),
              "; check the disk, the memory and the mounted folder of the hosts that differ");
}

// A record as one line, as sha256sum prints files.
std::string line_of(const LoadedRecord& record) {
  return text(record.sha256, "  ", record.name);
}

std::string name_in(const std::string& line) {
  return line.substr(kSha256Digits + 2);
}

std::vector<std::string> strings_in(const std::vector<c10::IValue>& values) {
  std::vector<std::string> strings;
  for (const auto& value : values) strings.push_back(value.toStringRef());
  return strings;
}

std::string digest_of(const std::vector<std::string>& lines) {
  Sha256 sha;
  for (const auto& line : lines) sha.add(text(line, "\n"));
  return hexadecimal(sha.finish());
}

/// Returns the name of the first record that differs; empty if none does.
std::string first_difference(const std::vector<std::string>& expected, const std::vector<std::string>& actual) {
  for (size_t i = 0; i < std::max(expected.size(), actual.size()); ++i) {
    if (i >= actual.size()) return name_in(expected[i]);
    if (i >= expected.size() || expected[i] != actual[i]) return name_in(actual[i]);
  }
  return "";
}

}  // namespace

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

std::optional<IntactCheckpoint> CheckpointLoader::find_intact(std::vector<std::string> names,
                                                              std::vector<std::string>& damage) const {
  for (;;) {
    std::string name;
    if (is_first() && !names.empty()) {
      name = names.back();
      names.pop_back();
    }
    name = group_.broadcast_object(name, 0).toStringRef();
    if (name.empty()) return std::nullopt;
    IntactCheckpoint found;
    auto wrong = read(in_folder(name), found.value);
    if (wrong.empty()) {
      wrong = verify_shards(shards_of(found.value), found.shard);
      if (wrong.empty()) return found;
      wrong = text("checkpoint ", in_folder(name), ": ", wrong);
    }
    if (is_first()) log_warning(text(wrong, "; it is skipped"));
    damage.push_back(std::move(wrong));
  }
}

/// Loads the file on all ranks at once. Returns, on all ranks, why it cannot be used: it is damaged, or the ranks have
/// read different bytes; empty if it can. Collective.
std::string CheckpointLoader::read(const std::string& path, Value& checkpoint) const {
  std::string damage;
  std::vector<std::string> lines;
  run_and_agree(group_, [&] {
    try {
      std::vector<LoadedRecord> records;
      checkpoint = load_with_digests(path, {}, &records);
      checkpoint.at(unit_).as_int();
      for (const auto& record : records) lines.push_back(line_of(record));
    } catch (const SystemError&) {
      throw;  // the file may be intact
    } catch (const CheckpointError& error) {
      damage = error.what();
    } catch (const Error& error) {
      damage = text("checkpoint ", path, ": ", error.what());
    }
  });
  const auto found = describe_damage(strings_in(group_.all_gather_object(damage)));
  return found.empty() ? compare(path, lines) : found;
}

/// Returns, on all ranks, which ranks have read different records than rank 0; empty if none has. Each record is a line
/// of its SHA-256 and its name. Usually the ranks exchange one digest each. Collective.
std::string CheckpointLoader::compare(const std::string& path, const std::vector<std::string>& records) const {
  const auto digests = strings_in(group_.all_gather_object(digest_of(records)));
  std::vector<int> others;
  for (size_t rank = 0; rank < digests.size(); ++rank)
    if (digests[rank] != digests[0]) others.push_back(static_cast<int>(rank));
  if (others.empty()) return "";
  const std::vector<c10::IValue> values(records.begin(), records.end());
  const auto of_first = group_.broadcast_object(c10::ivalue::Tuple::create(values), 0);
  const auto expected = strings_in(of_first.toTupleRef().elements().vec());
  const auto differing = strings_in(group_.all_gather_object(first_difference(expected, records)));
  return text("checkpoint ", path, ": ", describe_ranks(others), " loaded another file than rank 0: the first record ",
              "that differs is '", differing[static_cast<size_t>(others[0])],
              "'; let all hosts see the same folder, and let no other job write to it");
}

/// Returns, on all ranks, the damage of the shards; empty if they are intact. The ranks divide the files: each file is
/// verified by one rank. Sets `own` to the shard with this rank's number, if there is one. Collective.
std::string CheckpointLoader::verify_shards(const std::vector<ShardFile>& shards, std::optional<Value>& own) const {
  if (shards.empty()) return "";
  std::string wrong;
  run_and_agree(group_, [&] {
    const auto rank = static_cast<size_t>(group_.rank());
    for (size_t i = rank; i < shards.size() && wrong.empty(); i += static_cast<size_t>(group_.size())) {
      try {
        if (i == rank)
          own = load_shard(folder_, shards[i], {});
        else
          wrong = verify_shard(folder_, shards[i]);
      } catch (const CheckpointError& error) {
        wrong = error.what();
      }
    }
  });
  for (const auto& of_rank : strings_in(group_.all_gather_object(wrong)))
    if (!of_rank.empty()) return of_rank;
  return "";
}

bool CheckpointLoader::has_entry(const Value& checkpoint, const std::string& name) const {
  if (checkpoint.contains(name)) return true;
  const auto shards = shards_of(checkpoint);
  return !shards.empty() && load_shard(folder_, shards[0], {.map_location = c10::kMeta}).contains(name);
}

void CheckpointLoader::apply(const IntactCheckpoint& checkpoint, const TrainingState& state) const {
  check_same_parts(group_, state, unit_);
  std::vector<std::string> missing;
  for (const auto& part : state.parts())  // loading a part may be collective
    run_and_agree(group_, [&] {
      about_part("loading", part.name, [&] {
        if (strict_ || has_entry(checkpoint.value, part.name))
          apply_part(part, checkpoint);
        else
          missing.push_back(part.name);
      });
    });
  if (is_first() && !missing.empty())
    log_warning(text("the checkpoint lacks ", enumerate(missing), ": these parts keep their values"));
  const auto saved = checkpoint.value.at(kWorldSize).as_int();
  if (is_first() && saved != group_.size())
    log_info(text("the checkpoint was saved by ", saved, " ranks and is continued by ", group_.size()));
}

void CheckpointLoader::apply_part(const StatePart& part, const IntactCheckpoint& checkpoint) const {
  const auto rank = static_cast<size_t>(group_.rank());
  const auto shards = shards_of(checkpoint.value);
  if (!shards.empty() && !checkpoint.value.contains(part.name) && !part.is_per_rank) {
    // Verifies each shard, although one rank has done so in verify_shards(): this rank may read other bytes.
    const auto read = [&](size_t shard, const LoadOptions& options) {
      if (shard == rank && checkpoint.shard && options.map_location("cpu").is_cpu())
        return checkpoint.shard->at(part.name);
      auto verified = options;
      verified.verify = true;
      return load_shard(folder_, shards.at(shard), verified).at(part.name);
    };
    if (part.load_shards) return part.load_shards(shards.size(), read);
    std::vector<Value> all;
    for (size_t i = 0; i < shards.size(); ++i) all.push_back(read(i, {}));
    return part.load(merge_shards(all), group_);
  }
  const auto& value = checkpoint.value.at(part.name);
  if (!part.is_per_rank) return part.load(value, group_);
  if (part.load_rank_states) return part.load_rank_states(value.elements(), group_);
  if (rank < value.size()) part.load(value.elements()[rank], group_);
}

}  // namespace lockstep::detail
