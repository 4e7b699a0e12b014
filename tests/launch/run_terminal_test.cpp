#include <filesystem>
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/temporary_folder.h"
#include "support/terminal.h"

// The launcher in a terminal, which shows the progress bars of its workers in place.

namespace lockstep {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;

constexpr const char* kPrintColumns = "echo columns=$LOCKSTEP_TERMINAL.";

std::map<std::string, std::string> in_terminal(std::map<std::string, std::string> variables = {}) {
  variables.emplace("TERM", "xterm");
  variables.emplace("LOCKSTEP_TERMINAL", "");
  return clean_environment(variables);
}

std::vector<std::string> rows_of(const std::string& bytes, size_t columns) {
  Screen screen(columns);
  screen.write(bytes);
  return screen.rows();
}

std::vector<std::string> show(const std::vector<std::string>& arguments, int columns) {
  TerminalProcess process(run_command(arguments), columns, in_terminal());
  EXPECT_EQ(process.wait(), 0) << process.bytes();
  return rows_of(process.bytes(), static_cast<size_t>(columns));
}

/// A shell's loop that ends when the file exists.
std::string wait_for(const std::string& file) {
  return "while [ ! -e " + file + " ]; do sleep 0.01; done; ";
}

std::string content_of(const std::string& path) {
  std::stringstream content;
  content << std::ifstream(path).rdbuf();
  return content.str();
}

TEST(RunTerminal, TellsWorkersTheColumnsAfterTheirPrefix) {
  EXPECT_THAT(show({"-n", "2", "sh", "-c", kPrintColumns}, 60),
              UnorderedElementsAre("[0] columns=56.", "[1] columns=56."));
  EXPECT_THAT(show({"-n", "1", "--role", "trainer", "sh", "-c", kPrintColumns}, 100),
              ElementsAre("[trainer 0] columns=88."));
}

TEST(RunTerminal, DoesNotTellAWidthWhereOutputIsNotShownInATerminal) {
  EXPECT_THAT(run_launcher({"-n", "1", "sh", "-c", kPrintColumns}, {{"LOCKSTEP_TERMINAL", "33"}}).output,
              HasSubstr("[0] columns=.\n"))
      << "not that of an outer launcher either";
  TemporaryFolder folder;
  const auto logs = (folder.path() / "logs").string();
  EXPECT_THAT(show({"-n", "1", "--log-dir", logs, "sh", "-c", kPrintColumns}, 60), Contains("[0] columns=."));
  EXPECT_THAT(show({"-n", "1", "--log-dir", logs, "--redirects", "1", "sh", "-c", kPrintColumns}, 60), IsEmpty());
  EXPECT_EQ(content_of(logs + "/0/0/stdout"), "columns=.\n");
}

TEST(RunTerminal, KeepsTheBarOnTheLastRowBelowLinesOfOthers) {
  TemporaryFolder folder;
  const auto line = (folder.path() / "line").string(), end = (folder.path() / "end").string();
  TerminalProcess process(
      run_command({"-n", "2", "sh", "-c",
                   "if [ $RANK = 0 ]; then printf 'bar at 10\\r'; " + wait_for(end) + "echo done; else " +
                       wait_for(line) + "echo a line; echo an error >&2; " + wait_for(end) + "fi"}),
      60, in_terminal({{"NO_COLOR", "1"}}));
  process.expect("[0] bar at 10");
  std::ofstream(line) << "";
  process.expect("[1] a line\r\n\r\033[K[0] bar at 10");
  process.expect("[1] an error\r\n\r\033[K[0] bar at 10");
  EXPECT_THAT(rows_of(process.bytes(), 60), UnorderedElementsAre("[1] a line", "[1] an error", "[0] bar at 10"));
  std::ofstream(end) << "";
  EXPECT_EQ(process.wait(), 0);
  EXPECT_THAT(rows_of(process.bytes(), 60), UnorderedElementsAre("[1] a line", "[1] an error", "[0] done"));
}

TEST(RunTerminal, ShowsTheSameStateAgainAfterALineOfTheWorker) {
  TemporaryFolder folder;
  const auto line = (folder.path() / "line").string(), end = (folder.path() / "end").string();
  TerminalProcess process(run_command({"-n", "1", "sh", "-c",
                                       "printf 'bar at 10\\r'; " + wait_for(line) + "printf 'a line\\nbar at 10\\r'; " +
                                           wait_for(end) + "echo done"}),
                          60, in_terminal({{"NO_COLOR", "1"}}));
  process.expect("[0] bar at 10");
  std::ofstream(line) << "";
  process.expect("a line\r\n\r\033[K[0] bar at 10");
  EXPECT_THAT(rows_of(process.bytes(), 60), ElementsAre("[0] a line", "[0] bar at 10"));
  std::ofstream(end) << "";
  EXPECT_EQ(process.wait(), 0);
  EXPECT_THAT(rows_of(process.bytes(), 60), ElementsAre("[0] a line", "[0] done"));
}

TEST(RunTerminal, CutsABarOffAndEndsItsColour) {
  const std::string state = "\\033[36m" + std::string(40, 'x') + "\\033[0m";
  TerminalProcess process(run_command({"-n", "1", "sh", "-c", "printf '" + state + "\\r'; sleep 0.1; echo done"}), 30,
                          in_terminal());
  EXPECT_EQ(process.wait(), 0);
  EXPECT_THAT(process.bytes(),
              AllOf(HasSubstr("\033[36m" + std::string(25, 'x') + "\033[0m"), Not(HasSubstr(std::string(26, 'x')))));
}

TEST(RunTerminal, WritesNoEscapesToAnErrorFile) {
  TemporaryFolder folder;
  const auto errors = (folder.path() / "errors").string(), line = (folder.path() / "line").string();
  const std::string tool = LOCKSTEP_TOOL;
  TerminalProcess process({"sh", "-c",
                           tool + " run -n 1 sh -c \"printf 'bar at 10\\r'; " + wait_for(line) +
                               "echo an error >&2; echo done\" 2> " + errors},
                          60, in_terminal());
  process.expect("bar at 10");
  std::ofstream(line) << "";
  EXPECT_EQ(process.wait(), 0) << process.bytes();
  EXPECT_EQ(content_of(errors), "[0] an error\n");
  EXPECT_THAT(rows_of(process.bytes(), 60), ElementsAre("[0] done"));
}

}  // namespace
}  // namespace lockstep
