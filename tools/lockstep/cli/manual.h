#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace lockstep::tool {

/// What a shell offers for a value.
enum class Completion { kNothing, kFiles, kFolders, kWords, kProgram };

/// What stands behind an option's name, or by itself as a positional.
struct Value {
  std::string name;                // "FILE", "N|cpu|gpu|auto"; empty: a flag, which has no value
  std::vector<std::string> words;  // the alternatives of `name` that are written as they stand: cpu, gpu, auto
  Completion completion = Completion::kNothing;
  bool is_optional = false;
  bool is_repeated = false;
};

/// An option, a flag or a positional.
struct Entry {
  std::vector<std::string> names;  // "-n", "--nproc-per-node"; empty: a positional
  Value value;
  std::string description;
  std::string default_value;  // empty: none to speak of
  std::string variable;       // of the environment; empty: none
  std::string group;          // the heading it stands under
};

/// "Examples" and what is indented below that heading, line by line.
struct ManualSection {
  std::string title;
  std::vector<std::string> lines;
};

/// All that is said about `lockstep` or one of its commands: help, man pages and completion print it in their ways.
struct Manual {
  std::string name;  // "lockstep", "lockstep run"
  std::string description;
  std::vector<Entry> positionals;
  std::vector<Entry> options;      // --help comes last
  std::vector<std::string> notes;  // paragraphs
  std::vector<ManualSection> sections;
  std::vector<Manual> commands;
};

/// Reads a command as it was given to CLI11. Whatever is in a group without a name is hidden and left out.
///
/// - A type name is shown as it is, without what checks add to it. Its alternatives in lower case are offered as words,
///   FILE and DIR as files and folders. A positional `program` is a program to start and, repeated, its arguments.
/// - In the footer, an indented block below "Heading:" is a section. All else are notes, a paragraph each.
Manual read_manual(const CLI::App& app);

/// "run" of "lockstep run".
std::string last_word(const std::string& name);

std::string to_upper(std::string text);

}  // namespace lockstep::tool
