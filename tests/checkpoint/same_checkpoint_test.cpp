// All ranks load the same checkpoint, also if one of them reads other bytes than rank 0. Stand-in for a bad read, or
// for a host that sees another file: one rank uses a copy of the folder.

#include <lockstep/checkpoint_directory.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/digest.h"
#include "checkpoint/files.h"
#include "checkpoint/zip.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;

/// What the ranks save and load: the same tensor, and values of each rank.
struct Content {
  explicit Content(int rank) : mine(rank) {}
  TrainingState state() {
    return TrainingState{}.add("other", other).add("tensor", tensor).add_per_rank("mine", mine).add_rng();
  }
  torch::Tensor other = torch::zeros({1000});
  torch::Tensor tensor = torch::zeros({1000});
  double mine = 0;
};

class SameCheckpoint : public testing::Test {
 protected:
  std::string folder() const { return (temporary_.path() / "shared").string(); }
  std::string copy() const { return (temporary_.path() / "copy").string(); }
  /// The folder that a rank sees, if rank `odd` sees the copy.
  std::string folder_of(int rank, int odd) const { return rank == odd ? copy() : folder(); }

  /// Saves checkpoints 0 and 1, with tensors that are filled with these values.
  static void save(const std::string& folder, float first, float second) {
    run_threads(3, [&](ProcessGroup world) {
      Content content(world.rank());
      CheckpointDirectory checkpoints(world, folder);
      content.tensor.fill_(first);
      checkpoints.save(0, content.state());
      content.tensor.fill_(second);
      checkpoints.save(1, content.state());
    });
  }

  /// The copy shares the lock file, from which ranks tell that they see the folder of rank 0.
  void copy_folder() const {
    std::filesystem::create_directories(copy());
    for (const auto& entry : std::filesystem::directory_iterator(folder())) {
      const auto name = entry.path().filename();
      if (name == ".lock")
        std::filesystem::create_hard_link(entry.path(), copy() / name);
      else
        std::filesystem::copy_file(entry.path(), copy() / name);
    }
  }

  /// Changes a byte in the middle of the file's largest record, which is that of a tensor.
  static void damage(const std::string& path) {
    const detail::FileSource source(path);
    const auto records = detail::read_zip(source);
    const auto largest =
        std::max_element(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.size < b.size; });
    std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(static_cast<std::streamoff>(largest->offset + largest->size / 2));
    stream.put('!');
    ASSERT_TRUE(stream.good());
  }

  /// Resumes on 3 ranks, of which rank `odd` sees the copy. Expects that all ranks load checkpoint 0, and that rank 0
  /// warns with all of `parts`. Expects that load(1) throws an error with them on each rank.
  template <class... Parts>
  void expect_that_all_ranks_refuse_checkpoint_1(int odd, const Parts&... parts) const {
    const LogLines log;
    run_threads(3, [&](ProcessGroup world) {
      Content content(world.rank());
      content.mine = -1;
      CheckpointDirectory checkpoints(world, folder_of(world.rank(), odd));
      EXPECT_EQ(checkpoints.resume(content.state()), 1);
      EXPECT_TRUE(torch::equal(content.tensor, torch::full({1000}, 7.0f)));
      EXPECT_EQ(content.mine, world.rank());
      expect_error<CheckpointError>([&] { checkpoints.load(1, content.state()); },
                                    "rank " + std::to_string(world.rank()), "step-00000001.pt", parts...);
    });
    EXPECT_THAT(log.lines(), Contains(AllOf(HasSubstr("step-00000001.pt"), HasSubstr("skipped"), HasSubstr(parts)...)));
  }

  TemporaryFolder temporary_;
};

TEST_F(SameCheckpoint, MayHoldValuesThatDifferBetweenRanks) {
  save(folder(), 7, 8);
  copy_folder();
  run_threads(3, [&](ProcessGroup world) {
    Content content(world.rank());
    content.mine = -1;
    CheckpointDirectory checkpoints(world, folder_of(world.rank(), 1));
    EXPECT_EQ(checkpoints.resume(content.state()), 2);
    EXPECT_TRUE(torch::equal(content.tensor, torch::full({1000}, 8.0f)));
    EXPECT_EQ(content.mine, world.rank());
  });
}

TEST_F(SameCheckpoint, IsTheOneBeforeIfOneRankReadsDamage) {
  save(folder(), 7, 8);
  copy_folder();
  damage(copy() + "/step-00000001.pt");
  expect_that_all_ranks_refuse_checkpoint_1(1, "on rank 1, but not on ranks 0 and 2", "record 'data/", "SHA-256",
                                            "check the disk");
  expect_that_all_ranks_refuse_checkpoint_1(0, "on rank 0, but not on ranks 1 and 2", "record 'data/", "SHA-256");
}

TEST_F(SameCheckpoint, IsTheOneBeforeIfOneRankSeesAnotherIntactFile) {
  save(folder(), 7, 8);
  save(copy(), 7, 9);
  std::filesystem::remove(copy() + "/.lock");
  std::filesystem::create_hard_link(folder() + "/.lock", copy() + "/.lock");
  expect_that_all_ranks_refuse_checkpoint_1(2, "rank 2 loaded another file than rank 0",
                                            "first record that differs is 'data/1'", "see the same folder");
}

TEST_F(SameCheckpoint, IsTheOneBeforeIfOneRankLacksTheFile) {
  save(folder(), 7, 8);
  copy_folder();
  std::filesystem::remove(copy() + "/step-00000001.pt");
  expect_that_all_ranks_refuse_checkpoint_1(1, "on rank 1, but not on ranks 0 and 2", "no such file");
}

/// Writes the file again without lockstep's manifest, as Python writes it: its records then have only a CRC-32.
void remove_manifest(const std::string& path) {
  std::vector<detail::ZipRecord> records;
  std::vector<std::string> contents;
  {
    const detail::FileSource source(path);
    for (const auto& record : detail::read_zip(source))
      if (!record.name.ends_with("manifest.json")) {
        records.push_back(record);
        contents.push_back(source.read(record.offset, record.size));
      }
  }
  const auto begin = detail::lay_out_zip(records);
  std::ofstream stream(path, std::ios::binary);
  for (size_t i = 0; i < records.size(); ++i) {
    records[i].crc = detail::crc32_of(contents[i]);
    stream << detail::zip_header(records[i]) << contents[i];
  }
  stream << detail::zip_directory(records, begin);
  ASSERT_TRUE(stream.good());
}

TEST_F(SameCheckpoint, IsComparedWithoutAManifestAsWell) {
  save(folder(), 7, 8);
  save(copy(), 7, 9);
  for (const auto& path : {folder() + "/step-00000001.pt", copy() + "/step-00000001.pt"}) {
    remove_manifest(path);
    ASSERT_FALSE(verify_checkpoint(path).has_manifest);
    ASSERT_TRUE(verify_checkpoint(path).damage.empty());
  }
  std::filesystem::remove(copy() + "/.lock");
  std::filesystem::create_hard_link(folder() + "/.lock", copy() + "/.lock");
  expect_that_all_ranks_refuse_checkpoint_1(1, "rank 1 loaded another file than rank 0", "'data/1'");
}

// Of three shards, rank 0 of two ranks verifies the first and the last, but rank 1 loads the last.
TEST_F(SameCheckpoint, ShardsAreVerifiedByTheRankThatLoadsThem) {
  using Optimizer = ZeroRedundancyOptimizer<torch::optim::AdamW>;
  const auto run = [&](int ranks, const std::function<void(Optimizer&, CheckpointDirectory&, int)>& body) {
    run_threads(ranks, [&](ProcessGroup world) {
      auto parameter = torch::ones({300, 20});
      Optimizer optimizer({parameter}, world, torch::optim::AdamWOptions(0.01));
      parameter.mutable_grad() = torch::sin(parameter);
      optimizer.step();
      CheckpointDirectory checkpoints(world, folder_of(world.rank(), ranks == 2 ? 1 : -1), {.sharded = true});
      body(optimizer, checkpoints, world.rank());
    });
  };
  run(3, [](auto& optimizer, auto& checkpoints, int) {
    checkpoints.save(0, TrainingState{}.add("optimizer", optimizer));
  });
  copy_folder();
  const auto shards = shards_of(load_checkpoint(folder() + "/step-00000000.pt"));
  ASSERT_EQ(shards.size(), 3u);
  run(2, [](auto& optimizer, auto& checkpoints, int) {
    EXPECT_EQ(checkpoints.resume(TrainingState{}.add("optimizer", optimizer)), 1);
  });
  damage(copy() + "/" + shards[2].file);
  run(2, [&](auto& optimizer, auto& checkpoints, int rank) {
    expect_error<CheckpointError>([&] { checkpoints.resume(TrainingState{}.add("optimizer", optimizer)); },
                                  rank == 0 ? "on rank 1" : "", "loading 'optimizer'", shards[2].file, "record 'data/",
                                  "SHA-256");
  });
}

}  // namespace
}  // namespace lockstep
