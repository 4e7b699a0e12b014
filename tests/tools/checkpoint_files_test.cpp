// `lockstep checkpoint convert` and `prune`, which write and remove files, and the start of the helper program.

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "base/file_descriptor.h"
#include "tools/checkpoint_process.h"

namespace lockstep {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// --- convert

class Convert : public CheckpointCommand {
 protected:
  /// Saves an optimizer in two shards, and returns the checkpoint as if it had none.
  Value save_sharded_optimizer(const std::string& stem) const {
    const auto average = at::arange(6, at::kFloat).view({2, 3});
    const auto groups = Value::list({Value::dict({{"lr", 0.5}, {"params", Value::list({0})}})});
    const auto shard = [&](int64_t begin, int64_t size) {
      const auto state = Value::dict({{"exp_avg", average.view({-1}).narrow(0, begin, size)}});
      const auto piece = Value::dict({{"parameter", 0}, {"begin", begin}, {"size", size}, {"state", state}});
      return Value::dict({{"optimizer", Value::dict({{"param_groups", groups},
                                                     {"sizes", Value::list({Value::list({2, 3})})},
                                                     {"strides", Value::list({Value::list({3, 1})})},
                                                     {"pieces", Value::list({piece})}})}});
    };
    save_sharded(stem, Value::dict({{"epoch", 7}}), shard(0, 4), shard(4, 2));
    const auto state = Value::dict({{0, Value::dict({{"exp_avg", average}})}});
    return Value::dict({{"epoch", 7},
                        {"lockstep", "0.1.0"},
                        {"optimizer", Value::dict({{"state", state}, {"param_groups", groups}})}});
  }
};

TEST_F(Convert, WritesSafetensorsAndBack) {
  const auto weight = at::rand({3, 4});
  const auto nested = Value::dict({{"fc", Value::dict({{"weight", weight}})}, {"parts", Value::list({at::ones({2})})}});
  save("a.pt", Value::dict({{"model", nested}, {"epoch", 3}, {"metrics", Value::dict({{"loss", 0.5}})}}));
  const auto there = run("convert a.pt a.safetensors");
  EXPECT_EQ(there.code, 0) << there.errors;
  EXPECT_EQ(there.output, "wrote a.safetensors: 2 tensors, 56 B\n");
  EXPECT_EQ(there.errors, "note: not tensors, so not in a.safetensors: epoch, metrics\n");
  const auto tensors = load_checkpoint(path("a.safetensors"));
  EXPECT_EQ(tensors, Value::dict({{"model.fc.weight", weight}, {"model.parts.0", at::ones({2})}}));
  EXPECT_EQ(run("convert a.safetensors b.pt").code, 0);
  EXPECT_EQ(load_checkpoint(path("b.pt")), tensors);
  EXPECT_TRUE(verify_checkpoint(path("b.pt")).has_manifest);
}

TEST_F(Convert, RewritesAFileOfPyTorchWithChecksums) {
  const auto bytes = torch::jit::pickle_save(c10::IValue(at::arange(5)));
  std::ofstream(path("a.pt"), std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ASSERT_FALSE(verify_checkpoint(path("a.pt")).has_manifest);
  EXPECT_EQ(run("convert a.pt b.pt").code, 0);
  EXPECT_TRUE(verify_checkpoint(path("b.pt")).has_manifest);
  EXPECT_EQ(load_checkpoint(path("b.pt")), Value(at::arange(5)));
}

TEST_F(Convert, SelectsOneEntry) {
  save("a.pt", Value::dict({{"model", Value::dict({{"w", at::ones({2})}})}, {"other", at::zeros({9})}}));
  EXPECT_EQ(object("convert --key model a.pt b.pt")["tensors"], 1);
  EXPECT_EQ(load_checkpoint(path("b.pt")), Value::dict({{"w", at::ones({2})}}));
  expect_failure("convert --key modle a.pt c.pt", 2, "a.pt: has no entry 'modle'; its entries are model, other");
  EXPECT_FALSE(exists("c.pt"));
}

TEST_F(Convert, NamesTensorsThatShareMemory) {
  const auto shared = at::ones({4});
  save("a.pt", Value::dict({{"encoder", shared}, {"decoder", shared.view({2, 2})}, {"alone", at::ones({4})}}));
  const auto ran = run("convert a.pt a.safetensors");
  EXPECT_EQ(ran.errors, "note: written 2 times, because safetensors files cannot share memory: encoder, decoder\n");
  EXPECT_EQ(object("convert --force a.pt a.safetensors")["written_more_than_once"],
            json::parse(R"([["encoder", "decoder"]])"));
}

TEST_F(Convert, ReplacesNothingByAccident) {
  save("a.pt", Value::dict({{"x", at::ones({2})}}));
  save("b.pt", Value::dict({{"y", 1}}));
  ASSERT_EQ(::symlink("a.pt", path("link.pt").c_str()), 0);
  expect_failure("convert a.pt b.pt", 2, "b.pt: exists already; choose another name or add --force");
  expect_failure("convert --force a.pt link.pt", 2, "link.pt: is both IN and OUT");
  expect_failure("convert a.pt b.txt", 2, "b.txt: unknown extension, expected .pt, .pth or .safetensors");
  expect_failure("convert b.pt b.safetensors", 2, "b.pt: contains no tensors");
  EXPECT_EQ(load_checkpoint(path("b.pt")), Value::dict({{"y", 1}}));
  EXPECT_EQ(run("convert --force a.pt b.pt").code, 0);
  EXPECT_EQ(load_checkpoint(path("b.pt")), load_checkpoint(path("a.pt")));
}

TEST_F(Convert, RefusesNamesThatWouldCollide) {
  const auto inner = Value::dict({{"b", at::ones({1})}});
  save("a.pt", Value::dict({{"a.b", at::zeros({1})}, {"a", inner}}));
  expect_failure("convert a.pt a.safetensors", 2, "two tensors would have the name 'a.b'");
  EXPECT_FALSE(exists("a.safetensors"));
}

TEST_F(Convert, MergesShards) {
  const auto expected = save_sharded_optimizer("step-00000007");
  EXPECT_EQ(run("convert step-00000007.pt all.pt").code, 0);
  EXPECT_EQ(load_checkpoint(path("all.pt")), expected);
  EXPECT_EQ(run("diff all.pt step-00000007.pt").code, 0);
  EXPECT_THAT(run("show step-00000007.pt").output, HasSubstr("optimizer.state.0.exp_avg"));
  ASSERT_EQ(::unlink(path("step-00000007.shard-1-of-2-1a2b3c4d.pt").c_str()), 0);
  expect_failure("convert step-00000007.pt some.pt", 1, "step-00000007.shard-1-of-2-1a2b3c4d.pt");
  EXPECT_FALSE(exists("some.pt"));
}

// --- prune

class Prune : public CheckpointCommand {
 protected:
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(folder_.path()))
      if (const auto name = file.path().filename().string(); !name.starts_with('.')) names.push_back(name);
    std::sort(names.begin(), names.end());
    return names;
  }

  void save_steps(std::initializer_list<int> numbers) const {
    for (int number : numbers) save("step-0000000" + std::to_string(number) + ".pt", Value::dict({{"step", number}}));
  }
};

TEST_F(Prune, KeepsTheLastFilesOfEachUnit) {
  save_steps({1, 2, 3, 4});
  for (const auto* name : {"epoch-00000001.pt", "epoch-00000002.pt", "mine.pt", "step-1.pt"}) save(name, Value::dict());
  const auto bytes = std::filesystem::file_size(path("step-00000001.pt"));
  const auto object = this->object("prune . --keep-last 2");
  EXPECT_EQ(object["removed"], json({{{"file", "step-00000001.pt"}, {"bytes", bytes}, {"shards", 0}},
                                     {{"file", "step-00000002.pt"}, {"bytes", bytes}, {"shards", 0}}}));
  EXPECT_EQ(object["freed_bytes"], 2 * bytes);
  EXPECT_THAT(files(), ElementsAre("epoch-00000001.pt", "epoch-00000002.pt", "mine.pt", "step-00000003.pt",
                                   "step-00000004.pt", "step-1.pt"));
}

TEST_F(Prune, LeavesFilesThatOnlyLookLikeCheckpoints) {
  for (const int day : {1, 2, 3}) {
    save("model-2026010" + std::to_string(day) + ".pt", Value::dict({{"x", day}}));
    save("round-0000000" + std::to_string(day) + ".pt", Value::dict({{"round", day}}));
  }
  EXPECT_EQ(run("prune . --keep-last 1").code, 0);
  EXPECT_THAT(files(), ElementsAre("model-20260101.pt", "model-20260102.pt", "model-20260103.pt", "round-00000003.pt"));
}

TEST_F(Prune, KeepsMultiples) {
  save_steps({1, 2, 3, 4, 5, 6});
  const auto ran = run("prune . --keep-last 1 --keep-every 3");
  EXPECT_EQ(ran.code, 0) << ran.errors;
  EXPECT_THAT(ran.output, AllOf(HasSubstr("removed ./step-00000001.pt  "), HasSubstr("4 checkpoints removed, "),
                                HasSubstr(" freed; 2 kept\n")));
  EXPECT_THAT(files(), ElementsAre("step-00000003.pt", "step-00000006.pt"));
}

TEST_F(Prune, RemovesShardsWithTheirMainFile) {
  save_sharded("step-00000001");
  save_sharded("step-00000002");
  EXPECT_EQ(object("prune . --keep-last 1")["removed"][0]["shards"], 2);
  EXPECT_THAT(files(), ElementsAre("step-00000002.pt", "step-00000002.shard-0-of-2-1a2b3c4d.pt",
                                   "step-00000002.shard-1-of-2-1a2b3c4d.pt"));
}

TEST_F(Prune, KeepsTheTargetOfBest) {
  for (const bool is_symbolic : {true, false}) {
    save_sharded("step-00000001");
    save_steps({2, 3});
    ASSERT_EQ(is_symbolic ? ::symlink("step-00000001.pt", path("best.pt").c_str())
                          : ::link(path("step-00000001.pt").c_str(), path("best.pt").c_str()),
              0);
    EXPECT_EQ(run("prune . --keep-last 1").code, 0);
    EXPECT_THAT(files(), ElementsAre("best.pt", "step-00000001.pt", "step-00000001.shard-0-of-2-1a2b3c4d.pt",
                                     "step-00000001.shard-1-of-2-1a2b3c4d.pt", "step-00000003.pt"));
    ASSERT_EQ(::unlink(path("best.pt").c_str()), 0);
  }
}

TEST_F(Prune, KeepsShardsThatACopyUses) {
  save_sharded("step-00000001");
  save_steps({2, 3});
  std::filesystem::copy_file(path("step-00000001.pt"), path("best.pt"));
  EXPECT_EQ(run("prune . --keep-last 1").code, 0);
  EXPECT_EQ(run("verify best.pt").code, 0);
}

TEST_F(Prune, RemovesNothingIfTheShardsOfBestAreNotKnown) {
  save_steps({1, 2});
  std::ofstream(path("best.pt")) << "garbage";
  expect_failure("prune . --keep-last 1", 1, "nothing was removed");
  EXPECT_TRUE(exists("step-00000001.pt"));
}

TEST_F(Prune, RemovesNothingWhileAJobUsesTheFolder) {
  save_steps({1, 2});
  {
    std::ofstream(path(".lock")) << "process 7 on here";
    const FileDescriptor lock(::open(path(".lock").c_str(), O_RDWR | O_CLOEXEC));
    ASSERT_EQ(::flock(lock.get(), LOCK_EX | LOCK_NB), 0);
    expect_failure("prune . --keep-last 1", 2, "in use by process 7 on here; nothing was removed");
    EXPECT_EQ(run("prune . --keep-last 1 --dry-run").code, 0);
    EXPECT_TRUE(exists("step-00000001.pt"));
  }
  EXPECT_EQ(run("prune . --keep-last 1").code, 0);
  EXPECT_FALSE(exists("step-00000001.pt"));
}

TEST_F(Prune, KeepsIntactFilesBelowDamagedOnes) {
  save_steps({1, 2, 3});
  std::ofstream(path("step-00000003.pt")) << "garbage";
  EXPECT_EQ(run("prune . --keep-last 1").code, 0);
  EXPECT_THAT(files(), ElementsAre("step-00000002.pt", "step-00000003.pt"));
}

TEST_F(Prune, OnlyPrintsInADryRun) {
  save_steps({1, 2});
  const auto ran = run("prune . --keep-last 1 --dry-run");
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.output, AllOf(HasSubstr("would remove ./step-00000001.pt  "),
                                HasSubstr("1 checkpoint would be removed, "), HasSubstr("would be freed; 1 kept\n")));
  EXPECT_THAT(files(), ElementsAre("step-00000001.pt", "step-00000002.pt"));
}

TEST_F(Prune, LeavesShardsWithoutAMainFile) {
  save_sharded("step-00000001");
  save_steps({2, 3});
  ASSERT_EQ(::unlink(path("step-00000001.pt").c_str()), 0);
  const auto ran = run("prune . --keep-last 1");
  EXPECT_THAT(ran.errors, HasSubstr("note: 2 shard files without a main file were left alone, such as "));
  EXPECT_TRUE(exists("step-00000001.shard-0-of-2-1a2b3c4d.pt"));
}

TEST_F(Prune, NeedsToKnowHowManyToKeep) {
  save_steps({1, 2});
  expect_failure("prune .", 2, "--keep-last is required");
  expect_failure("prune . --keep-last 0", 2, "--keep-last: 0 is not valid");
  expect_failure("prune . --keep-last 1 --keep-every -2", 2, "--keep-every: -2 is not valid");
  expect_failure("prune nowhere --keep-last 1", 2, "nowhere: no such folder");
  EXPECT_TRUE(exists("step-00000001.pt"));
}

// --- the helper program

using Helper = CheckpointCommand;

TEST_F(Helper, TakesAPathThatLooksLikeAnOptionOrACommand) {
  save("--json", Value::dict({{"epoch", 1}}));
  save("diff", Value::dict({{"epoch", 2}}));
  EXPECT_THAT(run("show -- --json").output, HasSubstr("epoch: 1"));
  EXPECT_THAT(run("show diff").output, HasSubstr("epoch: 2"));
}

TEST_F(Helper, IsLookedForBesideLockstep) {
  std::filesystem::copy_file(LOCKSTEP_TOOL, path("alone"));
  const auto ran = shell("./alone checkpoint ls .");
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.errors, HasSubstr("lockstep-checkpoint is neither beside lockstep nor in ../libexec/lockstep"));
  EXPECT_THAT(shell("./alone checkpoint ls --help").output, HasSubstr("Usage: lockstep checkpoint ls"));
}

}  // namespace
}  // namespace lockstep
