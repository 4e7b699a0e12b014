// Completion in the shells themselves: bash by the variables that readline sets, zsh in a terminal.

#include "cli/completion.h"

#include <fstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/temporary_folder.h"
#include "tools/installed_programs.h"

namespace lockstep::tool {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using testing::UnorderedElementsAreArray;

using Words = std::vector<std::string>;

Words lines_of(const std::string& text) {
  Words lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// A folder with programs and files to complete, in which a shell has the script.
class ShellCompletion : public testing::Test {
 protected:
  ShellCompletion() {
    std::filesystem::create_directories(folder_.path() / "logs of mine");
    for (const auto* name : {"job.secret", "my data.csv", "train.txt", "train"}) write(name, "");
    std::filesystem::permissions(folder_.path() / "train", std::filesystem::perms::owner_all);
  }

  void write(const std::string& name, const std::string& text) const { std::ofstream(folder_.path() / name) << text; }

  TemporaryFolder folder_;
};

class BashCompletion : public ShellCompletion {
 protected:
  BashCompletion() { write("script", bash_completion(all_commands())); }

  /// What bash offers for the last of these words, as readline cuts them. `prelude` is run before.
  Words offered(const Words& words, const std::string& prelude = "") const {
    Words quoted;
    for (const auto& word : words) quoted.push_back("'" + word + "'");
    const auto command = fmt::format(
        "exec 2>&1; cd '{}'; source ./script; {}\nCOMP_WORDS=({}) COMP_CWORD={}\n_lockstep\n"
        "[ ${{#COMPREPLY[@]}} = 0 ] || printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        folder_.path().string(), prelude, fmt::join(quoted, " "), words.size() - 1);
    const auto output = run({"bash", "--norc", "--noprofile", "-c", command});
    EXPECT_EQ(output.failure, "");
    return lines_of(output.output);
  }
};

TEST_F(BashCompletion, OffersTheCommands) {
  Words names;
  for (const auto& command : all_commands().commands) names.push_back(last_word(command.name));
  EXPECT_THAT(offered({"lockstep", ""}), UnorderedElementsAreArray(names));
  EXPECT_THAT(offered({"lockstep", "r"}), ElementsAre("run"));
  EXPECT_THAT(offered({"lockstep", "ma"}), IsEmpty());
  EXPECT_THAT(offered({"lockstep", "--v"}), ElementsAre("--version"));
}

TEST_F(BashCompletion, OffersEveryOptionOfEveryCommand) {
  for (const auto& command : all_commands().commands) {
    Words names;
    for (const auto& option : command.options) names.insert(names.end(), option.names.begin(), option.names.end());
    EXPECT_THAT(offered({"lockstep", last_word(command.name), "-"}), UnorderedElementsAreArray(names)) << command.name;
  }
  EXPECT_THAT(offered({"lockstep", "run", "--bind", "-n", "2", "--nn"}), ElementsAre("--nnodes"));
  EXPECT_THAT(offered({"lockstep", "nothing", "-"}), IsEmpty());
}

TEST_F(BashCompletion, OffersTheCommandsOfACommand) {
  EXPECT_THAT(offered({"lockstep", "checkpoint", ""}), ElementsAre("ls", "show", "verify", "diff", "convert", "prune"));
  EXPECT_THAT(offered({"lockstep", "checkpoint", "p"}), ElementsAre("prune"));
  EXPECT_THAT(offered({"lockstep", "checkpoint", "prune", "--keep-l"}), ElementsAre("--keep-last"));
  EXPECT_THAT(offered({"lockstep", "checkpoint", "diff", "x.pt", "jo"}), ElementsAre("job.secret"));
  EXPECT_THAT(offered({"lockstep", "checkpoint", "prune", "--keep-last", "1", ""}), ElementsAre("logs of mine"));
  EXPECT_THAT(offered({"lockstep", "checkpoint", "nothing", "-"}), IsEmpty());
}

TEST_F(BashCompletion, OffersWhatAValueCanBe) {
  EXPECT_THAT(offered({"lockstep", "run", "-n", ""}), UnorderedElementsAre("cpu", "gpu", "auto"));
  EXPECT_THAT(offered({"lockstep", "run", "--nproc-per-node", "g"}), ElementsAre("gpu"));
  EXPECT_THAT(offered({"lockstep", "completion", ""}), ElementsAre("bash", "zsh"));
  EXPECT_THAT(offered({"lockstep", "completion", "bash", ""}), IsEmpty());
  EXPECT_THAT(offered({"lockstep", "run", "--grace", ""}), IsEmpty());
  EXPECT_THAT(offered({"lockstep", "run", "--grace", "--"}), IsEmpty());
}

TEST_F(BashCompletion, OffersFilesAndFolders) {
  EXPECT_THAT(offered({"lockstep", "run", "--secret-file", "jo"}), ElementsAre("job.secret"));
  EXPECT_THAT(offered({"lockstep", "doctor", "--probe", "my"}), ElementsAre("my data.csv"));
  EXPECT_THAT(offered({"lockstep", "run", "--log-dir", ""}), ElementsAre("logs of mine"));
}

TEST_F(BashCompletion, OffersTheValueBehindAnEqualsSign) {
  EXPECT_THAT(offered({"lockstep", "run", "--secret-file", "=", "jo"}), ElementsAre("job.secret"));
  EXPECT_THAT(offered({"lockstep", "run", "--nproc-per-node", "="}), UnorderedElementsAre("cpu", "gpu", "auto"));
  EXPECT_THAT(offered({"lockstep", "run", "--secret-file=jo"}), ElementsAre("--secret-file=job.secret"));
  EXPECT_THAT(offered({"lockstep", "run", "--bind", "="}), IsEmpty());
}

TEST_F(BashCompletion, OffersProgramsAndThenTheirFiles) {
  EXPECT_THAT(offered({"lockstep", "run", "-n", "4", "./tr"}), ElementsAre("./train"));
  EXPECT_THAT(offered({"lockstep", "run", "ba"}), Contains("bash"));
  EXPECT_THAT(offered({"lockstep", "run", "lo"}), Contains("logs of mine"));
  EXPECT_THAT(offered({"lockstep", "run", "--", "./tr"}), ElementsAre("./train"));
  EXPECT_THAT(offered({"lockstep", "run", "-n2", "--nnodes", "=", "1", "./train", "my"}), ElementsAre("my data.csv"));
  EXPECT_THAT(offered({"lockstep", "run", "./train", "--lo"}), IsEmpty());  // not our --log-dir
}

TEST_F(BashCompletion, KnowsThatAValueMayBeLeftOut) {
  EXPECT_THAT(offered({"lockstep", "run", "--tee", "./tr"}), ElementsAre("./train"));
  EXPECT_THAT(offered({"lockstep", "run", "--redirects", "=", "0", ":", "3,1", ":", "1", "./tr"}),
              ElementsAre("./train"));
}

TEST_F(BashCompletion, LeavesAProgramsArgumentsToTheProgramsOwnCompletion) {
  const auto* bash_completion_project = "_command_offset() { COMPREPLY=(\"own completion of ${COMP_WORDS[$1]}\"); }";
  EXPECT_THAT(offered({"lockstep", "run", "--nnodes", "=", "1", "./train", "--"}, bash_completion_project),
              ElementsAre("own completion of ./train"));
}

TEST_F(BashCompletion, IsRegisteredForLockstep) {
  EXPECT_THAT(offered({"lockstep", "run", "-n", "c"}, "complete -p lockstep"),
              ElementsAre("complete -F _lockstep lockstep", "cpu"));
}

// Types a line and TAB in an interactive zsh, in a terminal, and prints what stands there then.
constexpr const char* kZshDriver = R"(
zmodload zsh/zpty
cd -- $1
mkfifo answers
zpty terminal zsh -f -i
zpty -w terminal 'source ./inside'
exec {answers}<answers  # opens when the other side does, and is then ready for the line
zpty -n -w terminal "$2"$'\t'
read -r -u $answers line
print -r -- $line
zpty -d terminal
rm answers
)";

constexpr const char* kZshInside = R"(
autoload -Uz compinit && compinit -u -D
source ./script
complete-and-tell() { zle complete-word; print -r -u $answers -- "$BUFFER"; }
zle -N complete-and-tell
bindkey '^I' complete-and-tell
exec {answers}>answers
)";

class ZshCompletion : public ShellCompletion {
 protected:
  void SetUp() override {
    if (!run({"sh", "-c", "command -v zsh"}).failure.empty()) GTEST_SKIP() << "there is no zsh (apt-get install zsh)";
    write("script", zsh_completion(all_commands()));
    write("driver", kZshDriver);
    write("inside", kZshInside);
  }

  /// What zsh makes of this line, but for a space at its end.
  std::string completed(const std::string& line) const {
    const auto folder = folder_.path().string();
    const auto output = run({"zsh", "-f", folder + "/driver", folder, line});
    EXPECT_EQ(output.failure, "");
    return output.output.substr(0, output.output.find('\n'));
  }
};

TEST_F(ZshCompletion, IsASoundScript) {
  const auto checked = run({"sh", "-c", "zsh -n '" + (folder_.path() / "script").string() + "' 2>&1"});
  EXPECT_EQ(checked.failure, "");
  EXPECT_EQ(checked.output, "");
}

TEST_F(ZshCompletion, CompletesCommands) {
  for (const auto& command : all_commands().commands) {
    const auto name = last_word(command.name);
    EXPECT_EQ(completed("lockstep " + name.substr(0, name.size() - 1)), "lockstep " + name);
  }
}

TEST_F(ZshCompletion, CompletesTheCommandsOfACommand) {
  EXPECT_EQ(completed("lockstep checkpoint pru"), "lockstep checkpoint prune");
  EXPECT_EQ(completed("lockstep checkpoint prune --keep-l"), "lockstep checkpoint prune --keep-last=");
  EXPECT_EQ(completed("lockstep checkpoint diff x.pt jo"), "lockstep checkpoint diff x.pt job.secret");
}

TEST_F(ZshCompletion, CompletesOptionsAndTheirValues) {
  EXPECT_EQ(completed("lockstep run --bind --nn"), "lockstep run --bind --nnodes=");
  EXPECT_EQ(completed("lockstep run -n g"), "lockstep run -n gpu");
  EXPECT_EQ(completed("lockstep run --nproc-per-node=g"), "lockstep run --nproc-per-node=gpu");
  EXPECT_EQ(completed("lockstep run --secret-file jo"), "lockstep run --secret-file job.secret");
  EXPECT_EQ(completed("lockstep run --log-dir "), "lockstep run --log-dir logs\\ of\\ mine/");
  EXPECT_EQ(completed("lockstep completion z"), "lockstep completion zsh");
}

TEST_F(ZshCompletion, CompletesProgramsAndThenTheirFiles) {
  EXPECT_EQ(completed("lockstep run -n 4 ./tr"), "lockstep run -n 4 ./train");
  EXPECT_EQ(completed("lockstep run --tee ./tr"), "lockstep run --tee ./train");
  EXPECT_EQ(completed("lockstep run -- ./tr"), "lockstep run -- ./train");
  EXPECT_EQ(completed("lockstep run ./train my"), "lockstep run ./train my\\ data.csv");
  EXPECT_EQ(completed("lockstep run ./train --log"), "lockstep run ./train --log");  // not our --log-dir
}

// --- the command

TEST(CompletionCommand, PrintsTheScripts) {
  EXPECT_EQ(run({LOCKSTEP_TOOL, "completion", "bash"}).output, bash_completion(all_commands()));
  EXPECT_EQ(run({LOCKSTEP_TOOL, "completion", "zsh"}).output, zsh_completion(all_commands()));
}

TEST(CompletionCommand, NamesTheShellsThatItKnows) {
  const auto refused = run({"sh", "-c", LOCKSTEP_TOOL " completion fish 2>&1; echo $?"});
  EXPECT_THAT(refused.output, AllOf(HasSubstr("no completion for fish, only for bash and zsh"),
                                    HasSubstr("See lockstep completion --help.\n2\n")));
}

}  // namespace
}  // namespace lockstep::tool
