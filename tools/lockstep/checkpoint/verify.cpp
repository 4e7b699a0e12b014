#include <algorithm>
#include <iostream>

#include <c10/core/DeviceType.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>

#include "checkpoint/entries.h"
#include "checkpoint/listing.h"
#include "checkpoint/operations.h"
#include "checkpoint/table.h"

namespace lockstep::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxTensors = 5;  // named per record in the text

/// A file with its damage, and the damage of the shards that it lists.
struct Verified {
  std::string path;
  Verification verification;
  size_t shards = 0;
  std::vector<Damage> shard_damage{};  // the record is the name of the shard

  bool is_intact() const { return verification.damage.empty() && shard_damage.empty(); }
};

/// Why the shard is not the shard that the main file lists; empty if it is.
std::string check_shard(const std::string& path, const ShardFile& listed) {
  if (!is_file(path)) return "is missing";
  const auto found = verify_checkpoint(path);
  if (!found.damage.empty()) return describe(found.damage[0]);
  if (found.sha256 != listed.sha256)
    return fmt::format("belongs to another checkpoint: its SHA-256 is {}, expected {}",
                       found.sha256.empty() ? "missing" : found.sha256.substr(0, 16), listed.sha256.substr(0, 16));
  return "";
}

void verify_shards(Verified& verified) {
  const auto folder = verified.path.substr(0, verified.path.rfind('/') + 1);
  const auto value = load_checkpoint(verified.path, {.map_location = c10::kMeta, .verify = false});
  for (const auto& listed : shards_of(value)) {
    ++verified.shards;
    if (const auto wrong = check_shard(folder + listed.file, listed); !wrong.empty())
      verified.shard_damage.push_back({listed.file, wrong});
  }
}

Verified verify(const std::string& path) {
  Verified verified{path, {}};
  try {
    verified.verification = verify_checkpoint(path);
    if (verified.verification.damage.empty()) verify_shards(verified);
  } catch (const Error& error) {
    verified.verification.damage.push_back({"", error.what()});
  }
  return verified;
}

std::string method_of(const Verified& verified) {
  if (verified.verification.has_manifest) return "SHA-256";
  return verified.path.ends_with(".safetensors") ? "structure only: safetensors files have no checksums"
                                                 : "CRC-32 only: the file has no manifest of lockstep";
}

std::string names_text(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kMaxTensors);
  auto text = fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<ptrdiff_t>(shown), ", "));
  if (shown < names.size()) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

void print_verified(const Verified& verified, size_t path_columns, const Style& style) {
  const auto& found = verified.verification;
  std::string facts = fmt::format("{}, {}", human_bytes(found.bytes), counted(found.records, "record"));
  if (verified.shards > 0) facts += ", " + counted(verified.shards, "shard");
  const bool is_intact = verified.is_intact();
  std::cout << paint(is_intact ? "intact " : "damaged", is_intact ? kGreen : kRed, style)
            << fmt::format("  {:<{}}  {} ({})\n", printable(verified.path), path_columns, facts, method_of(verified));
  for (const auto& damage : found.damage) {
    std::cout << "         " + printable(describe(damage)) + "\n";
    if (!damage.tensors.empty()) std::cout << "           tensors: " + printable(names_text(damage.tensors)) + "\n";
  }
  for (const auto& damage : verified.shard_damage)
    std::cout << fmt::format("         shard {}: {}\n", printable(damage.record), printable(damage.what));
  std::cout << std::flush;
}

void print_verified_json(const Verified& verified) {
  const auto& found = verified.verification;
  ordered_json object{
      {"file", verified.path},          {"intact", verified.is_intact()},
      {"manifest", found.has_manifest}, {"sha256", found.sha256.empty() ? ordered_json() : ordered_json(found.sha256)},
      {"bytes", found.bytes},           {"records", found.records},
      {"shards", verified.shards},      {"damage", ordered_json::array()}};
  for (const auto& damage : found.damage)
    object["damage"].push_back({{"record", damage.record}, {"what", damage.what}, {"tensors", damage.tensors}});
  for (const auto& damage : verified.shard_damage)
    object["damage"].push_back({{"shard", damage.record}, {"what", damage.what}});
  print_json(object);
}

}  // namespace

int run_verify(const Arguments& arguments) {
  const auto style = output_style();
  const auto files = find_files(arguments.paths);
  size_t damaged = 0, path_columns = 0;
  for (const auto& file : files) path_columns = std::min<size_t>(std::max(path_columns, file.path.size()), 50);
  std::vector<Verified> results;
  for (const auto& file : files) {
    // best.pt is a second name of another file: read the file once.
    const auto is_same_file = [&](const CheckpointFile& earlier) {
      return earlier.is_same_file(file) && folder_of(earlier.path) == folder_of(file.path);
    };
    const auto same = std::find_if(files.begin(), files.begin() + static_cast<ptrdiff_t>(results.size()), is_same_file);
    const auto index = static_cast<size_t>(same - files.begin());
    auto verified = index < results.size() ? results[index] : verify(file.path);
    verified.path = file.path;
    results.push_back(verified);
    arguments.json ? print_verified_json(verified) : print_verified(verified, path_columns, style);
    if (!verified.is_intact()) ++damaged;
  }
  if (!arguments.json && files.empty()) std::cout << "no checkpoint files (.pt, .pth, .safetensors)\n";
  if (!arguments.json && files.size() > 1)
    std::cout << fmt::format("\n{}, {} damaged\n", counted(files.size(), "file"), damaged) << std::flush;
  return damaged == 0 ? 0 : 1;
}

}  // namespace lockstep::checkpoint
