#include "cli/man_page.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"
#include "tools/installed_programs.h"

namespace lockstep::tool {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

bool has_program(const std::string& name) {
  return run({"sh", "-c", "command -v " + name}).failure.empty();
}

/// The page as roff prints it, but for the fonts.
std::string without_escapes(std::string page) {
  for (size_t at = 0; (at = page.find("\\-", at)) != std::string::npos;) page.erase(at, 1);
  return page;
}

TEST(ManPage, NamesEveryOptionOfEveryCommand) {
  for (const auto& command : all_commands().commands) {
    const auto page = without_escapes(man_page(command, "1.2.3"));
    for (const auto& option : command.options) {
      for (const auto& name : option.names) EXPECT_THAT(page, HasSubstr("\\fB" + name + "\\fR")) << command.name;
      EXPECT_THAT(page, HasSubstr(option.variable)) << command.name;
    }
  }
}

TEST(ManPage, OfLockstepLeadsToThatOfEachCommand) {
  const auto lockstep = all_commands();
  const auto page = without_escapes(man_page(lockstep, "1.2.3"));
  EXPECT_THAT(page, StartsWith(".TH \"LOCKSTEP\" \"1\" \"\" \"lockstep 1.2.3\""));
  for (const auto& command : lockstep.commands)
    EXPECT_THAT(page, HasSubstr("\\fB" + page_name(command) + "\\fR(1)")) << command.name;
  EXPECT_THAT(without_escapes(man_page(lockstep.commands[0], "1.2.3")), HasSubstr("\\fBlockstep\\fR(1)\n"));
  EXPECT_THAT(without_escapes(man_page(lockstep.commands[0], "1.2.3")),
              HasSubstr("\nlockstep-run - start a program as several ranks"));
}

TEST(ManPage, QuotesWhatRoffWouldTakeForItself) {
  Manual manual;
  manual.name = "odd";
  manual.description = ".oO is 'no' request";
  manual.sections = {{"Examples", {"'a \\n b", ".sh c"}}};
  const auto page = man_page(manual, "1.2.3");
  EXPECT_THAT(page, HasSubstr("\n\\&.oO is \\(aqno\\(aq request.\n"));
  EXPECT_THAT(page, HasSubstr("\n\\&\\(aqa \\en b\n\\&.sh c\n"));
}

/// The pages as the build writes them.
class WrittenPages : public testing::Test {
 protected:
  WrittenPages() { written_ = run({LOCKSTEP_TOOL, "man", folder_.path().string()}); }

  std::vector<std::string> paths() const {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) paths.push_back(entry.path());
    return paths;
  }

  TemporaryFolder folder_;
  ProgramOutput written_;
};

/// How many pages a command and its own commands have.
size_t count_pages(const Manual& manual) {
  size_t count = 1;
  for (const auto& command : manual.commands) count += count_pages(command);
  return count;
}

TEST_F(WrittenPages, AreOneForLockstepAndOneForEachCommand) {
  ASSERT_EQ(written_.failure, "");
  EXPECT_EQ(paths().size(), count_pages(all_commands()));
  for (const auto* name :
       {"lockstep.1", "lockstep-run.1", "lockstep-completion.1", "lockstep-checkpoint.1", "lockstep-checkpoint-ls.1"})
    EXPECT_TRUE(std::filesystem::exists(folder_.path() / name)) << name;
}

TEST_F(WrittenPages, AreFaultlessToGroff) {
  if (!has_program("groff")) GTEST_SKIP() << "there is no groff (apt-get install groff)";
  ASSERT_FALSE(paths().empty());
  for (const auto& path : paths()) {
    const auto warnings = run({"sh", "-c", "groff -man -ww -z -Tutf8 '" + path + "' 2>&1"});
    EXPECT_EQ(warnings.failure, "") << path;
    EXPECT_EQ(warnings.output, "") << path;
  }
}

TEST_F(WrittenPages, ReadWellInATerminal) {
  if (!has_program("groff")) GTEST_SKIP() << "there is no groff (apt-get install groff)";
  const auto page = run({"groff", "-man", "-Tascii", "-P-c", "-P-b", "-P-o", "-P-u", "-rLL=78n",
                         (folder_.path() / "lockstep-run.1").string()});
  ASSERT_EQ(page.failure, "");
  EXPECT_THAT(page.output, HasSubstr("\n       -n, --nproc-per-node N|cpu|gpu|auto\n"));
  EXPECT_THAT(page.output, HasSubstr("\n       lockstep run [OPTIONS] PROGRAM [ARGUMENT...]\n"));
  EXPECT_THAT(page.output, HasSubstr("--master-addr node0 \\\n           --secret-file job.secret"));
  EXPECT_THAT(page.output, HasSubstr("\n       3   a worker failed: the first to fail exited, gave up or hung\n"));
}

TEST(ManCommand, NamesTheFolderThatItCannotWriteTo) {
  const auto refused = run({LOCKSTEP_TOOL, "man", "/nowhere"});
  EXPECT_THAT(refused.failure, HasSubstr("/nowhere/lockstep.1 cannot be written"));
}

}  // namespace
}  // namespace lockstep::tool
