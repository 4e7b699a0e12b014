#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::tool {

/// What a shell offers as completion of a value.
enum class Completion { kNothing, kFiles, kFolders, kWords, kProgram };

/// The value of an option or of a positional.
struct Value {
  std::string name;                // "FILE", "N|cpu|gpu|auto"; empty: a flag, which has no value
  std::vector<std::string> words;  // the literal alternatives in `name`: cpu, gpu, auto
  Completion completion = Completion::kNothing;
  bool is_optional = false;
  bool is_repeated = false;
};

/// An option, a flag or a positional.
struct Entry {
  std::vector<std::string> names;  // "-n", "--nproc-per-node"; empty: a positional
  Value value;
  std::string description;
  std::string default_value;  // empty: none
  std::string variable;       // environment variable; empty: none
  std::string group;          // heading in the help
};

/// A heading, such as "Examples", with the indented lines below it.
struct ManualSection {
  std::string title;
  std::vector<std::string> lines;
};

/// The documentation of `lockstep` or one of its commands, from which help, man pages and completion are generated.
struct Manual {
  std::string name;  // "lockstep", "lockstep run"
  std::string description;
  std::vector<Entry> positionals;
  std::vector<Entry> options;      // --help is last
  std::vector<std::string> notes;  // paragraphs
  std::vector<ManualSection> sections;
  std::vector<Manual> commands;
};

/// Reads a command from its CLI11 table. Entries in a group without a name are hidden and skipped.
///
/// - A type name is shown without the suffixes that CLI11's checks add. Its lower-case alternatives are completed as
/// words, FILE and DIR as files and folders. A positional `program` is a program to start and, if repeated, its
/// arguments.
/// - In the footer, an indented block below "Heading:" is a section. Other paragraphs are notes.
Manual read_manual(const CLI::App& app);

/// "run" of "lockstep run".
std::string last_word(const std::string& name);

std::string to_upper(std::string text);

}  // namespace lockstep::tool
