// What is read from the table of commands, and what every command owes its users.

#include "cli/manual.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command_line.h"
#include "cli/help_text.h"

namespace lockstep::tool {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::EndsWith;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

const Entry& option_of(const Manual& manual, const std::string& name) {
  for (const auto& option : manual.options)
    for (const auto& one : option.names)
      if (one == name) return option;
  throw std::runtime_error("no option " + name);
}

/// A table with one of everything.
class ReadManual : public testing::Test {
 protected:
  ReadManual() : app_("Of all kinds", "all") {
    app_.add_option("-n,--number", number_, "A number")->envname("NUMBER")->capture_default_str();
    app_.add_option("--wait", seconds_, "How long")->type_name("SECONDS")->check(CLI::NonNegativeNumber);
    app_.add_option("--file", text_, "A file")->check(CLI::ExistingFile);
    app_.add_option("--dir", text_, "A folder")->type_name("DIR");
    app_.add_option("--shell", text_, "A shell")->check(CLI::IsMember({"bash", "zsh"}));
    app_.add_option("--operation", text_, "One of many")->type_name("NAME")->check(CLI::IsMember({"sum", "avg"}));
    app_.add_option("--either", text_, "A number or a word")->type_name("N|cpu|gpu");
    app_.add_option("--perhaps", text_, "With or without")->expected(0, 1);
    app_.add_option("--list", texts_, "In one word")->delimiter(',')->allow_extra_args(false);
    app_.add_flag("--flag,!--no-flag", flag_, "On or off");
    app_.add_flag("--hidden", flag_, "For nobody")->group("");
    app_.add_option("program", texts_, "What to start");
    app_.footer("One note\nin two lines.\n\nAnother.\nExamples:\n  all -n 3\n    --file x\n\nExit codes:\n  0  well\n");
    app_.add_subcommand("shown", "A command");
    app_.add_subcommand("unseen", "Not for people")->group("");
  }

  CLI::App app_;
  int number_ = 7;
  double seconds_ = 0;
  std::string text_;
  std::vector<std::string> texts_;
  bool flag_ = false;
};

TEST_F(ReadManual, KnowsNamesDefaultsAndVariables) {
  const auto manual = read_manual(app_);
  EXPECT_EQ(manual.name, "all");
  EXPECT_EQ(manual.description, "Of all kinds");
  const auto number = option_of(manual, "-n");
  EXPECT_THAT(number.names, ElementsAre("-n", "--number"));
  EXPECT_EQ(number.description, "A number");
  EXPECT_EQ(number.default_value, "7");
  EXPECT_EQ(number.variable, "NUMBER");
  EXPECT_THAT(option_of(manual, "--flag").names, ElementsAre("--flag", "--no-flag"));
  EXPECT_THAT(manual.options.back().names, ElementsAre("-h", "--help"));
}

TEST_F(ReadManual, ShowsValuesWithoutWhatChecksAdd) {
  const auto manual = read_manual(app_);
  EXPECT_EQ(value_text(option_of(manual, "-n").value), " N");
  EXPECT_EQ(value_text(option_of(manual, "--wait").value), " SECONDS");
  EXPECT_EQ(value_text(option_of(manual, "--file").value), " FILE");
  EXPECT_EQ(value_text(option_of(manual, "--shell").value), " bash|zsh");
  EXPECT_EQ(value_text(option_of(manual, "--operation").value), " NAME");
  EXPECT_EQ(value_text(option_of(manual, "--perhaps").value), " [TEXT]");
  EXPECT_EQ(value_text(option_of(manual, "--list").value), " TEXT");
  EXPECT_EQ(value_text(option_of(manual, "--flag").value), "");
}

TEST_F(ReadManual, KnowsWhatAShellCanOffer) {
  const auto manual = read_manual(app_);
  EXPECT_EQ(option_of(manual, "--file").value.completion, Completion::kFiles);
  EXPECT_EQ(option_of(manual, "--dir").value.completion, Completion::kFolders);
  EXPECT_EQ(option_of(manual, "--wait").value.completion, Completion::kNothing);
  EXPECT_THAT(option_of(manual, "--shell").value.words, ElementsAre("bash", "zsh"));
  EXPECT_THAT(option_of(manual, "--operation").value.words, ElementsAre("sum", "avg"));
  EXPECT_THAT(option_of(manual, "--either").value.words, ElementsAre("cpu", "gpu"));
  EXPECT_THAT(option_of(manual, "--wait").value.words, IsEmpty());
  ASSERT_EQ(manual.positionals.size(), 1U);
  EXPECT_EQ(manual.positionals[0].value.completion, Completion::kProgram);
  EXPECT_EQ(usage(manual), "all COMMAND [OPTIONS] PROGRAM [ARGUMENT...]");
}

TEST_F(ReadManual, LeavesOutWhatIsHidden) {
  const auto manual = read_manual(app_);
  EXPECT_THROW(option_of(manual, "--hidden"), std::runtime_error);
  ASSERT_EQ(manual.commands.size(), 1U);
  EXPECT_EQ(manual.commands[0].name, "all shown");
}

TEST_F(ReadManual, TakesTheFooterApart) {
  const auto manual = read_manual(app_);
  EXPECT_THAT(manual.notes, ElementsAre("One note in two lines.", "Another."));
  ASSERT_EQ(manual.sections.size(), 2U);
  EXPECT_EQ(manual.sections[0].title, "Examples");
  EXPECT_THAT(manual.sections[0].lines, ElementsAre("all -n 3", "  --file x"));
  EXPECT_EQ(manual.sections[1].title, "Exit codes");
  EXPECT_THAT(manual.sections[1].lines, ElementsAre("0  well"));
}

TEST_F(ReadManual, BecomesHelpThatFits) {
  const auto text = help_text(read_manual(app_), 50);
  EXPECT_THAT(text, HasSubstr("\n  -n, --number N          A number [default: 7]\n"
                              "                          [env: NUMBER]\n"));
  EXPECT_THAT(text, HasSubstr("\n      --operation NAME    One of many\n"));
  EXPECT_THAT(text, HasSubstr("\nOne note in two lines.\n\nAnother.\n\nExamples:\n  all -n 3\n    --file x\n\nExit"));
}

// --- the commands of lockstep itself

/// A command after its own commands.
void append_manuals(const Manual& manual, std::vector<Manual>& manuals) {
  for (const auto& command : manual.commands) append_manuals(command, manuals);
  manuals.push_back(manual);
}

/// `lockstep`, which is last, and every command that its users see.
std::vector<Manual> all_manuals() {
  const CommandLine command_line;
  std::vector<Manual> manuals;
  append_manuals(read_manual(command_line.app()), manuals);
  return manuals;
}

const std::vector<std::string>& section_of(const Manual& manual, const std::string& title) {
  static const std::vector<std::string> kNone;
  for (const auto& section : manual.sections)
    if (section.title == title) return section.lines;
  return kNone;
}

TEST(Commands, AreThere) {
  const auto manual = all_manuals().back();
  for (const auto* name :
       {"lockstep run", "lockstep doctor", "lockstep env", "lockstep checkpoint", "lockstep completion"})
    EXPECT_THAT(manual.commands, Contains(Field(&Manual::name, name)));
}

TEST(Commands, DescribeThemselvesAndEveryOption) {
  for (const auto& manual : all_manuals()) {
    EXPECT_THAT(manual.description, Not(IsEmpty())) << manual.name;
    EXPECT_THAT(manual.description, Not(EndsWith("."))) << manual.name;
    auto entries = manual.options;
    entries.insert(entries.end(), manual.positionals.begin(), manual.positionals.end());
    for (const auto& entry : entries) {
      const auto name = manual.name + " " + (entry.names.empty() ? entry.value.name : entry.names.back());
      EXPECT_THAT(entry.description, Not(IsEmpty())) << name << ": say what it is for";
      EXPECT_THAT(entry.description, Not(EndsWith("."))) << name;
    }
  }
}

TEST(Commands, GiveExamplesAndExitCodes) {
  for (const auto& manual : all_manuals()) {
    EXPECT_THAT(section_of(manual, "Examples"), Contains(HasSubstr(manual.name)))
        << manual.name << ": add an \"Examples:\" to its footer";
    EXPECT_THAT(section_of(manual, "Exit codes"), Contains(testing::StartsWith("0 ")))
        << manual.name << ": add an \"Exit codes:\" to its footer";
    EXPECT_THAT(section_of(manual, "Exit codes"), Contains(testing::StartsWith("2 "))) << manual.name;
  }
}

TEST(Commands, HaveHelpThatFitsIntoEightyColumns) {
  for (const auto& manual : all_manuals()) {
    std::istringstream lines(help_text(manual, 80));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80U) << manual.name << ": " << line;
  }
}

}  // namespace
}  // namespace lockstep::tool
