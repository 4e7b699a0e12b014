// `lockstep compile`, as a user starts it.

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr const char* kModels = R"(
import torch
from torch import nn


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


def make_branching():
    return Branching(4, 4), (torch.ones(2, 4),)


def make_number():
    return 3
)";

class CompileCommand : public testing::Test {
 protected:
  CompileCommand() { std::ofstream(folder_.path() / "models.py") << kModels; }

  /// Returns the exit code, and sets `said`.
  int compile(const std::string& function, const std::vector<std::string>& options = {}) {
    std::vector<std::string> command{LOCKSTEP_TOOL, "compile", (folder_.path() / function).string(), "-o",
                                     output().string()};
    command.insert(command.end(), options.begin(), options.end());
    RankProcess process(command, {{"OMP_NUM_THREADS", "1"}});
    const int code = process.wait();
    said = process.output();
    return code;
  }
  std::filesystem::path output() const { return folder_.path() / "model.pt2"; }

  std::string said;

 private:
  const TemporaryFolder folder_;
};

TEST_F(CompileCommand, NamesTheReleaseOfPyTorchThatItNeeds) {
  EXPECT_EQ(compile("models.py:make_number", {"--python", "/bin/false"}), 1);
  EXPECT_THAT(said, AllOf(HasSubstr("a python3 with PyTorch"), HasSubstr("/bin/false has no PyTorch")));
}

TEST_F(CompileCommand, RefusesWrongUsage) {
  EXPECT_EQ(compile("none.py:make"), 2);
  EXPECT_THAT(said, HasSubstr("none.py: no such file"));
  EXPECT_EQ(compile("models.py:make_more"), 2);
  EXPECT_THAT(said, HasSubstr("no function make_more; it has make_branching, make_number"));
  EXPECT_EQ(compile("models.py:make_number"), 2);
  EXPECT_THAT(said, HasSubstr("make_number() returned int; return (module, inputs)"));
}

TEST_F(CompileCommand, SaysWhyAModelCannotBeCompiled) {
  EXPECT_EQ(compile("models.py:make_branching"), 1);
  EXPECT_THAT(said, HasSubstr("cannot be exported: models.py:8: forward needs the value of a tensor (.item(), "));
  EXPECT_THAT(said, Not(HasSubstr("Traceback")));
  EXPECT_FALSE(std::filesystem::exists(output()));
}

}  // namespace
}  // namespace lockstep
