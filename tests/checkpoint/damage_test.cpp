// Damaged files: every change is found, and nothing worse than an error happens.

#include <fstream>
#include <iterator>
#include <random>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_directory.h>
#include <lockstep/checkpoint_file.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/archive.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/slowness.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

Value sample() {
  torch::manual_seed(1);
  auto model = Value::dict();
  for (int i = 0; i < 6; ++i) model.set("layer" + std::to_string(i) + ".weight", torch::randn({30, 20}));
  return Value::dict({{"model", model}, {"epoch", 3}, {"metrics", Value::dict({{"loss", 0.5}})}});
}

std::string bytes_of(const Value& value) {
  detail::MemorySink sink;
  detail::write_archive(sink, value);
  return sink.take();
}

Value value_of_bytes(const std::string& bytes, bool verify = true) {
  const detail::MemorySource source(bytes);
  return detail::ArchiveReader(source).load({.verify = verify});
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Damage, IsFoundWhereverABitFlips) {
  const auto intact = bytes_of(sample());
  ASSERT_EQ(value_of_bytes(intact), sample());
  std::mt19937_64 random(7);
  for (int i = 0; i < soak_count(10000); ++i) {
    auto bytes = intact;
    const auto bit = random() % (bytes.size() * 8);
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    EXPECT_THROW(value_of_bytes(bytes), CheckpointError) << "bit " << bit << " of " << bytes.size() * 8;
    try {
      value_of_bytes(bytes, /*verify=*/false);  // may be wrong, but must not crash
    } catch (const Error&) {
    } catch (const c10::Error&) {
      ADD_FAILURE() << "bit " << bit << ": LibTorch's error, expected lockstep's";
    }
  }
}

TEST(Damage, IsFoundInEveryByteOfTheHeadersAndTheDirectory) {
  const auto intact = bytes_of(Value::dict({{"x", torch::ones({3})}}));
  for (size_t i = 0; i < intact.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      auto bytes = intact;
      bytes[i] = static_cast<char>(bytes[i] ^ (1 << bit));
      EXPECT_THROW(value_of_bytes(bytes), CheckpointError) << "bit " << bit << " of byte " << i;
    }
}

TEST(Damage, IsFoundWhereverTheFileIsCut) {
  const auto intact = bytes_of(sample());
  for (size_t size = 0; size < intact.size(); size += 512)
    EXPECT_THROW(value_of_bytes(intact.substr(0, size)), CheckpointError) << size << " bytes";
  for (size_t size = intact.size() - 600; size < intact.size(); ++size)
    EXPECT_THROW(value_of_bytes(intact.substr(0, size)), CheckpointError) << size << " bytes";
  EXPECT_THROW(value_of_bytes(intact + "x"), CheckpointError);
}

// Of the files of a sharded optimizer, and of the file that lists them.
TEST(Damage, OfShardsIsFoundByAllRanksWhereverABitFlips) {
  const TemporaryFolder temporary;
  const auto folder = temporary.path().string();
  const LogLines warnings;
  run_threads(2, [&](ProcessGroup world) {
    auto weight = torch::ones({64}, torch::requires_grad());
    ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer({weight}, world, torch::optim::AdamWOptions(0.01));
    int64_t steps = 0;
    const auto state = TrainingState{}.add("optimizer", optimizer).add("steps", steps);
    CheckpointDirectory checkpoints(world, folder, {.sharded = true});
    Value first;
    for (; steps < 2; ++steps) {
      weight.mutable_grad() = torch::full({64}, static_cast<float>(steps + 1));
      optimizer.step();
      EXPECT_TRUE(checkpoints.save(steps, state));
      if (steps == 0) first = optimizer.state_dict();
    }
    std::vector<std::string> files{checkpoints.path(1)};
    for (const auto& shard : shards_of(load_checkpoint(checkpoints.path(1))))
      files.push_back(folder + "/" + shard.file);
    EXPECT_EQ(files.size(), 3u);
    std::mt19937_64 random(11);  // the same on all ranks
    for (int i = 0; i < soak_count(2000); ++i) {
      const auto& file = files[static_cast<size_t>(i) % files.size()];
      const auto intact = content_of(file);
      const auto bit = random() % (intact.size() * 8);
      SCOPED_TRACE(testing::Message() << "bit " << bit << " of " << intact.size() * 8 << " of " << file);
      auto bytes = intact;
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
      world.barrier();  // all ranks have read it
      if (world.rank() == 0) std::ofstream(file, std::ios::binary) << bytes;
      world.barrier();
      EXPECT_EQ(checkpoints.resume(state), 1);
      EXPECT_EQ(steps, 0);
      EXPECT_EQ(optimizer.state_dict(), first);
      const auto error = error_of<CheckpointError>([&] { checkpoints.load(1, state); });
      const auto same = error.substr(error.find(": ") + 2);  // without this rank's name
      for (const auto& other : world.all_gather_object(same)) EXPECT_EQ(other.toStringRef(), same);
      EXPECT_NE(same.find("step-00000001"), std::string::npos) << same;
      if (world.rank() == 0) std::ofstream(file, std::ios::binary) << intact;
    }
    world.barrier();
    EXPECT_EQ(checkpoints.resume(state), 2);
  });
}

TEST(Damage, IsNamed) {
  const TemporaryFolder folder;
  const auto path = (folder.path() / "a.pt").string();
  const auto model = Value::dict({{"a", torch::zeros({1000})}, {"b", torch::ones({1000})}});
  save_checkpoint(path, model);
  {
    const detail::FileSource source(path);
    const auto records = detail::read_zip(source);
    const auto found = std::find_if(records.begin(), records.end(),
                                    [](const auto& record) { return record.name == "archive/data/1"; });
    ASSERT_NE(found, records.end());
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(found->offset) + 100);
    file.put('!');
  }
  expect_error<CheckpointError>([&] { load_checkpoint(path); }, path, "record 'data/1'", "SHA-256");
  const auto verified = verify_checkpoint(path);
  EXPECT_TRUE(verified.has_manifest);
  ASSERT_EQ(verified.damage.size(), 1u);
  EXPECT_EQ(verified.damage[0].record, "data/1");
  EXPECT_NO_THROW(load_checkpoint(path, {.verify = false}));
}

TEST(Damage, OfAFileWithoutManifestIsFoundByItsChecksums) {
  torch::nn::Linear model(30, 20);
  std::ostringstream stream;
  torch::save(model, stream);
  auto bytes = stream.str();
  const detail::MemorySource source(bytes);
  for (const auto& record : detail::read_zip(source))
    if (record.name.find("/data/") != std::string::npos) bytes[record.offset + 5] ^= 1;
  expect_error<CheckpointError>([&] { value_of_bytes(bytes); }, "data/0", "CRC-32");
}

}  // namespace
}  // namespace lockstep
