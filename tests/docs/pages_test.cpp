// The pages of the documentation: links, messages, variables and form. Each failure names a page and a line.
//
// A message in docs/troubleshooting.md is quoted without its variable parts: `...` stands for each of them. The source
// of such a message is several string literals, and a literal may be split over lines. A quotation is right if all its
// fragments occur, in this order, in the joined literals of one source file.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const fs::path kRoot = fs::path(LOCKSTEP_TEST_SOURCE_DIR).parent_path();
constexpr size_t kColumns = 120;

std::string read_file(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return content.str();
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t");
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

/// The files below a folder with one of these extensions, or the file itself.
std::vector<fs::path> files_in(const fs::path& place, const std::set<std::string>& extensions) {
  std::vector<fs::path> files;
  if (fs::is_regular_file(place)) files.push_back(place);
  if (fs::is_directory(place))
    for (const auto& entry : fs::recursive_directory_iterator(place))
      if (entry.is_regular_file() && extensions.contains(entry.path().extension().string()))
        files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

// --- pages

struct Line {
  size_t number;
  std::string text;
  bool is_code;  // in a fenced block, or a fence
};

struct Link {
  size_t line;
  std::string target;
};

struct Heading {
  size_t line;
  std::string text;
};

/// The part of the anchor that GitHub makes from a heading.
std::string slug_of(const std::string& heading) {
  const auto text = std::regex_replace(heading, std::regex(R"(\[([^\]]*)\]\([^)]*\))"), "$1");
  std::string slug;
  for (const unsigned char c : text) {
    if (std::isalnum(c) || c == '-' || c == '_' || c >= 0x80) slug += static_cast<char>(std::tolower(c));
    if (c == ' ') slug += '-';
  }
  return slug;
}

/// A text whose code spans are blank. A span may extend over lines, and ends at a blank line at the latest.
std::string without_code_spans(std::string text) {
  for (auto begin = text.find('`'); begin != text.npos;) {
    const auto ticks = text.find_first_not_of('`', begin) - begin;
    const auto paragraph = std::min(text.find("\n\n", begin), text.size());
    const auto end = text.find(std::string(ticks, '`'), begin + ticks);
    if (end == text.npos || end > paragraph) {
      begin = text.find('`', begin + ticks);
      continue;
    }
    for (auto at = begin; at < end + ticks; ++at)
      if (text[at] != '\n') text[at] = ' ';
    begin = text.find('`', end + ticks);
  }
  return text;
}

class Page {
 public:
  explicit Page(const fs::path& path) : Page(path, read_file(path)) {}
  Page(fs::path path, const std::string& content) : path_(std::move(path)) {
    std::istringstream in(content);
    std::string fence, text;
    for (size_t number = 1; std::getline(in, text); ++number) {
      const auto marks = trimmed(text);
      const auto ticks = marks.substr(0, marks.find_first_not_of(marks.starts_with("~~~") ? '~' : '`'));
      const bool is_fence = ticks.size() >= 3;
      lines_.push_back({number, text, is_fence || !fence.empty()});
      if (fence.empty() && is_fence) {
        fence = ticks;
        open_fence_ = number;
      } else if (is_fence && ticks.size() >= fence.size() && ticks[0] == fence[0] && ticks == marks) {
        fence.clear();
        open_fence_.reset();
      }
    }
  }

  const fs::path& path() const { return path_; }
  const std::vector<Line>& lines() const { return lines_; }
  /// The line of a code block that is not closed.
  std::optional<size_t> open_fence() const { return open_fence_; }
  std::string at(size_t line) const { return fs::relative(path_, kRoot).string() + ":" + std::to_string(line) + ": "; }

  std::vector<Heading> headings() const {
    std::vector<Heading> headings;
    for (const auto& [number, text, is_code] : lines_)
      if (const auto level = text.find_first_not_of('#');
          !is_code && level != text.npos && level > 0 && text[level] == ' ')
        headings.push_back({number, trimmed(text.substr(level))});
    return headings;
  }

  std::set<std::string> anchors() const {
    std::map<std::string, int> used;
    std::set<std::string> anchors;
    for (const auto& [line, text] : headings()) {
      const auto slug = slug_of(text);
      const int before = used[slug]++;
      anchors.insert(before == 0 ? slug : slug + "-" + std::to_string(before));
    }
    return anchors;
  }

  /// Targets of links and images.
  std::vector<Link> links() const {
    std::string prose;
    for (const auto& line : lines_) prose += (line.is_code ? "" : line.text) + "\n";
    prose = without_code_spans(std::move(prose));
    static const std::regex link(R"re(\]\(\s*<?([^)\s>]*)|(?:src|href)="([^"]*)"|^\[[^\]]+\]:\s+(\S+))re",
                                 std::regex::ECMAScript | std::regex::multiline);
    std::vector<Link> links;
    for (auto found = std::sregex_iterator(prose.begin(), prose.end(), link); found != std::sregex_iterator();
         ++found) {
      const auto line = 1 + std::count(prose.begin(), prose.begin() + found->position(), '\n');
      for (size_t group = 1; group < found->size(); ++group)
        if ((*found)[group].matched) links.push_back({static_cast<size_t>(line), (*found)[group]});
    }
    return links;
  }

 private:
  const fs::path path_;
  std::vector<Line> lines_;
  std::optional<size_t> open_fence_;
};

std::vector<Page> all_pages() {
  std::vector<Page> pages;
  for (const char* name : {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"})
    pages.emplace_back(kRoot / name);
  for (const char* folder : {"docs", "examples"})
    for (const auto& path : files_in(kRoot / folder, {".md"})) pages.emplace_back(path);
  return pages;
}

bool is_external(const std::string& target) {
  return target.starts_with("https://") || target.starts_with("http://") || target.starts_with("mailto:");
}

/// The file that a link of the page points to.
fs::path file_of(const Page& page, const std::string& target) {
  const auto file = target.substr(0, target.find('#'));
  return file.empty() ? page.path() : (page.path().parent_path() / file).lexically_normal();
}

/// Whether the page links to the file.
bool links_to(const Page& page, const fs::path& file) {
  const auto links = page.links();
  return std::any_of(links.begin(), links.end(), [&](const Link& link) {
    return !is_external(link.target) && file_of(page, link.target) == file.lexically_normal();
  });
}

/// The code spans of a line, for example of the first cell of a table's row.
std::vector<std::string> code_spans(const std::string& text) {
  std::vector<std::string> spans;
  static const std::regex span("`([^`]+)`");
  for (auto found = std::sregex_iterator(text.begin(), text.end(), span); found != std::sregex_iterator(); ++found)
    spans.push_back((*found)[1]);
  return spans;
}

// --- sources

/// The string literals of C++ code, in order, with adjacent ones joined and escapes resolved.
std::vector<std::string> string_literals(const std::string& code) {
  std::vector<std::string> literals;
  size_t at = 0;
  bool joins = false;  // nothing but blanks and comments since the last literal
  const auto add = [&](const std::string& literal) {
    joins ? void(literals.back() += literal) : literals.push_back(literal);
    joins = true;
  };
  while (at < code.size()) {
    const char c = code[at];
    if (code.compare(at, 2, "//") == 0) {
      at = std::min(code.find('\n', at), code.size());
    } else if (code.compare(at, 2, "/*") == 0) {
      at = std::min(code.find("*/", at + 2), code.size() - 2) + 2;
    } else if (code.compare(at, 2, "R\"") == 0) {
      const auto open = code.find('(', at);
      const auto end = code.find(")" + code.substr(at + 2, open - at - 2) + "\"", open);
      if (end == code.npos) break;
      add(code.substr(open + 1, end - open - 1));
      at = end + open - at;
    } else if (c == '"' || (c == '\'' && (at == 0 || !std::isalnum(static_cast<unsigned char>(code[at - 1]))))) {
      std::string literal;
      for (++at; at < code.size() && code[at] != c; ++at) {
        const bool is_escaped = code[at] == '\\';
        if (is_escaped) ++at;
        literal += is_escaped && code[at] == 'n' ? '\n' : code[at];
      }
      ++at;
      if (c == '"') add(literal);
      if (c == '\'') joins = false;
    } else {
      if (!std::isspace(static_cast<unsigned char>(c))) joins = false;
      ++at;
    }
  }
  return literals;
}

bool is_cpp(const fs::path& path) {
  return path.extension() == ".cpp" || path.extension() == ".h";
}

/// What can be a part of a message: of other languages, the whole file with joined literals.
std::vector<std::string> texts_in(const fs::path& path) {
  if (is_cpp(path)) return string_literals(read_file(path));
  return {std::regex_replace(read_file(path), std::regex("\"[ \t]*\n[ \t]*\""), "")};
}

std::vector<fs::path> sources_in(std::initializer_list<const char*> places) {
  std::vector<fs::path> sources;
  for (const char* place : places)
    for (auto& file : files_in(kRoot / place, {".cpp", ".h", ".py", ".cmake", ".in", ".sh", ".txt"}))
      sources.push_back(std::move(file));
  return sources;
}

/// The fixed parts of a quotation.
std::vector<std::string> fragments_of(std::string quotation) {
  std::vector<std::string> fragments;
  quotation += "...";
  for (size_t begin = 0, end; (end = quotation.find("...", begin)) != quotation.npos; begin = end + 3)
    if (const auto fragment = trimmed(quotation.substr(begin, end - begin)); !fragment.empty())
      fragments.push_back(fragment);
  return fragments;
}

bool occurs_in(const std::vector<std::string>& texts, const std::vector<std::string>& fragments) {
  size_t text = 0, from = 0;
  for (const auto& fragment : fragments) {
    size_t found = std::string::npos;
    for (; text < texts.size(); ++text, from = 0)
      if (found = texts[text].find(fragment, from); found != std::string::npos) break;
    if (found == std::string::npos) return false;
    from = found + fragment.size();
  }
  return true;
}

/// Adds the names of variables that begin with LOCKSTEP_, each after one of the characters in `before`. Without such
/// characters: each that begins a word.
void add_variables(std::set<std::string>& names, const std::string& text, std::string_view before = "") {
  constexpr std::string_view kPrefix = "LOCKSTEP_", kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
  for (size_t at = text.find(kPrefix); at != text.npos; at = text.find(kPrefix, at + 1)) {
    const char previous = at == 0 ? ' ' : text[at - 1];
    const auto end = std::min(text.find_first_not_of(kLetters, at), text.size());
    const bool begins =
        before.empty() ? kLetters.find(previous) == kLetters.npos : before.find(previous) != before.npos;
    if (begins && end > at + kPrefix.size() && text[end - 1] != '_') names.insert(text.substr(at, end - at));
  }
}

/// The variables that a source reads, sets or mentions in messages. Not CMake's options, nor the preprocessor's names.
std::set<std::string> variables_of(const fs::path& path) {
  std::set<std::string> names;
  const auto extension = path.extension();
  const auto content = read_file(path);
  if (content.find("LOCKSTEP_") == content.npos || extension == ".cmake" || extension == ".in" || extension == ".txt")
    return names;
  if (is_cpp(path)) {
    for (const auto& literal : string_literals(content)) add_variables(names, literal);
  } else {
    add_variables(names, content, extension == ".py" ? "\"'" : "${");
  }
  return names;
}

/// "src/base/logging.cpp:68: ", the first place of a name in a file.
std::string place_of(const std::string& name, const fs::path& path) {
  const auto content = read_file(path);
  const auto at = content.begin() + static_cast<ptrdiff_t>(std::min(content.find(name), content.size()));
  return fs::relative(path, kRoot).string() + ":" + std::to_string(1 + std::count(content.begin(), at, '\n')) + ": ";
}

// --- the rules of this file

TEST(PageRules, SlugsAreThoseOfGitHub) {
  EXPECT_EQ(slug_of("lockstep doctor, lockstep env"), "lockstep-doctor-lockstep-env");
  EXPECT_EQ(slug_of("The command `lockstep`"), "the-command-lockstep");
  EXPECT_EQ(slug_of("Two hosts: the hierarchy, its [state](a.md) & file_names"),
            "two-hosts-the-hierarchy-its-state--file_names");
  EXPECT_THAT(Page("a.md", "# A\n## A\n```\n# B\n```\n").anchors(), ElementsAre("a", "a-1"));
}

TEST(PageRules, LinksAreFoundOverLinesAndOutsideOfCode) {
  const Page page("a.md", "[a\nb](c.md#d) `[x](y)`\n```\n[x](y)\n```\n[`e`](f.md \"title\") ![g](h.svg)\n[i]: j.md\n");
  std::vector<std::string> targets;
  for (const auto& link : page.links()) targets.push_back(std::to_string(link.line) + link.target);
  EXPECT_THAT(targets, ElementsAre("2c.md#d", "6f.md", "6h.svg", "7j.md"));
}

TEST(PageRules, LiteralsAreJoined) {
  EXPECT_THAT(string_literals("f(\"a \"  // \"x\"\n \"b\", '\"', 1'000, \"c\\\"\" /* \"y\" */, R\"(d)\");"),
              ElementsAre("a b", "c\"", "d"));
  EXPECT_THAT(fragments_of("a '...' is b"), ElementsAre("a '", "' is b"));
  EXPECT_TRUE(occurs_in({"x a '", "' is b."}, {"a '", "' is b"}));
  EXPECT_FALSE(occurs_in({"' is b.", "x a '"}, {"a '", "' is b"}));
}

// --- the pages

TEST(Pages, LinkToExistingFilesAndHeadings) {
  std::map<fs::path, std::set<std::string>> anchors_of;
  size_t count = 0;
  for (const auto& page : all_pages())
    for (const auto& [line, target] : page.links()) {
      if (is_external(target)) continue;
      ++count;
      const auto file = file_of(page, target);
      if (!fs::exists(file)) {
        ADD_FAILURE() << page.at(line) << "the link to " << target << " points to no file";
        continue;
      }
      const auto hash = target.find('#');
      if (hash == target.npos || file.extension() != ".md") continue;
      if (!anchors_of.contains(file)) anchors_of[file] = Page(file).anchors();
      EXPECT_TRUE(anchors_of[file].contains(target.substr(hash + 1)))
          << page.at(line) << "the link to " << target << " points to no heading";
    }
  EXPECT_GT(count, 100u);
}

TEST(Pages, AreReachableFromTheIndex) {
  const Page front(kRoot / "README.md"), index(kRoot / "docs/README.md");
  EXPECT_TRUE(links_to(front, index.path())) << "README.md has no link to docs/README.md";
  EXPECT_TRUE(links_to(index, kRoot / "examples/README.md")) << "docs/README.md has no link to examples/README.md";
  for (const auto& path : files_in(kRoot / "docs", {".md"}))
    EXPECT_TRUE(path == index.path() || links_to(index, path))
        << "docs/README.md has no link to " << path.filename().string();
}

TEST(Pages, QuoteMessagesOfTheSources) {
  constexpr size_t kShortest = 12;  // of the longest fragment; shorter ones say nothing
  std::map<fs::path, std::vector<std::string>> texts;
  for (const auto& source :
       sources_in({"src", "tools", "include", "cmake", "scripts", "quickstart", "test", "CMakeLists.txt"}))
    texts[source] = texts_in(source);
  const Page page(kRoot / "docs/troubleshooting.md");
  std::string section;
  size_t count = 0;
  for (const auto& [number, text, is_code] : page.lines()) {
    if (is_code) continue;
    if (text.starts_with("#")) section = text;
    const bool is_row = text.starts_with("|");
    if (section.find("Messages of LibTorch") != section.npos || !(is_row || text.starts_with("#"))) continue;
    for (const auto& quotation : code_spans(is_row ? text.substr(0, text.find('|', 1)) : text)) {
      ++count;
      const auto fragments = fragments_of(quotation);
      const bool is_long = std::any_of(fragments.begin(), fragments.end(),
                                       [](const std::string& fragment) { return fragment.size() >= kShortest; });
      EXPECT_TRUE(is_long) << page.at(number) << "quote more of '" << quotation << "'";
      EXPECT_TRUE(std::any_of(texts.begin(), texts.end(),
                              [&](const auto& source) { return occurs_in(source.second, fragments); }))
          << page.at(number) << "no source has the message '" << quotation << "'";
    }
  }
  EXPECT_GE(count, 40u);
}

TEST(Pages, ListTheVariablesThatSourcesRead) {
  const Page page(kRoot / "docs/environment.md");
  std::map<std::string, size_t> listed;  // with the line
  for (const auto& [number, text, is_code] : page.lines()) {
    std::set<std::string> names;
    add_variables(names, text);
    for (const auto& name : names) listed.emplace(name, number);
  }
  for (const auto& source : sources_in({"src", "tools", "quickstart", "test", "scripts"}))
    for (const auto& name : variables_of(source))
      EXPECT_TRUE(listed.contains(name)) << place_of(name, source) << "docs/environment.md does not list " << name;
  std::set<std::string> used;
  auto sources = sources_in({"src", "tools", "quickstart", "test", "scripts", "tests"});
  for (const auto& entry : fs::directory_iterator(kRoot / "tests/support")) sources.push_back(entry.path());
  for (const auto& source : sources) used.merge(variables_of(source));
  for (const auto& [name, line] : listed)
    EXPECT_TRUE(used.contains(name)) << page.at(line) << "no source uses " << name;
  EXPECT_GE(listed.size(), 10u);
}

TEST(Pages, ListEveryPublicHeader) {
  const auto reference = read_file(kRoot / "docs/reference.md");
  for (const auto& header : files_in(kRoot / "include/lockstep", {".h"})) {
    if (header.parent_path().filename() == "detail") continue;
    const auto name = header.filename().string();
    EXPECT_TRUE(std::regex_search(reference, std::regex("\\b" + name)) || name == "lockstep.h")
        << "docs/reference.md does not list " << name;
  }
}

TEST(Pages, NameTheTestedVersionsOfLibTorch) {
  std::ifstream list(kRoot / "tested_torch_versions.txt");
  std::vector<std::string> tested, in_table;
  for (std::string line; std::getline(list, line);)
    if (!line.starts_with("#")) tested.push_back(line.substr(0, line.find(' ')));
  ASSERT_GE(tested.size(), 2u);
  const Page versions(kRoot / "docs/versions.md");
  std::smatch version;
  for (const auto& [number, text, is_code] : versions.lines())
    if (std::regex_search(text, version, std::regex(R"(^\| ([0-9]+\.[0-9]+\.[0-9]+) \|)")))
      in_table.push_back(version[1]);
  EXPECT_EQ(in_table, tested) << "the table in docs/versions.md differs from tested_torch_versions.txt";
  for (const auto* page : {"README.md", "docs/README.md"}) {
    const auto text = read_file(kRoot / page);
    for (const auto& full : tested)
      EXPECT_THAT(text, HasSubstr(full.substr(0, full.rfind('.')))) << page << " lacks a tested release";
  }
}

TEST(Pages, HaveClosedCodeBlocksAndShortLines) {
  for (const auto& page : all_pages()) {
    if (const auto open = page.open_fence()) ADD_FAILURE() << page.at(*open) << "the code block is not closed";
    for (const auto& [number, text, is_code] : page.lines()) {
      if (is_code || trimmed(text).starts_with("|")) continue;
      const auto columns = std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xC0) != 0x80; });
      EXPECT_LE(static_cast<size_t>(columns), kColumns) << page.at(number) << "the line is too long";
    }
  }
}

}  // namespace
