#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "support/rank_process.h"

/// The rows that a terminal shows after some bytes; rows that would scroll out of it stay. Throws if the bytes have an
/// escape sequence other than those for colours and for erasing the rest of a row.
class Screen {
 public:
  explicit Screen(size_t columns) : columns_(columns) {}

  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const char first = bytes[0];
      size_t length = 1;
      if (first == '\r') {
        column_ = 0;
      } else if (first == '\n') {
        ++row_;
      } else if (first == '\033') {
        const auto end = bytes.find_first_of("mK");
        if (!bytes.starts_with("\033[") || end == bytes.npos) throw std::runtime_error("escape: " + std::string(bytes));
        if (bytes[end] == 'K' && column_ < row().size()) row().resize(column_);
        length = end + 1;
      } else {
        while (length < bytes.size() && (bytes[length] & 0xC0) == 0x80) ++length;
        put(std::string(bytes.substr(0, length)));
      }
      bytes.remove_prefix(length);
    }
  }

  /// Without spaces at the end of rows, and without empty rows at the end.
  std::vector<std::string> rows() const {
    std::vector<std::string> result;
    for (const auto& cells : rows_) result.push_back(text_of(cells));
    while (!result.empty() && result.back().empty()) result.pop_back();
    return result;
  }
  /// The last row that is not empty.
  std::string last_row() const {
    std::string text;
    for (size_t row = rows_.size(); row > 0 && text.empty(); --row) text = text_of(rows_[row - 1]);
    return text;
  }
  bool has_wrapped() const { return has_wrapped_; }

 private:
  static std::string text_of(const std::vector<std::string>& cells) {
    std::string text;
    for (const auto& cell : cells) text += cell;
    return text.erase(text.find_last_not_of(' ') + 1);
  }

  std::vector<std::string>& row() {
    if (rows_.size() <= row_) rows_.resize(row_ + 1);
    return rows_[row_];
  }

  void put(const std::string& character) {
    if (column_ == columns_) {
      has_wrapped_ = true;
      column_ = 0;
      ++row_;
    }
    if (row().size() <= column_) row().resize(column_ + 1, " ");
    row()[column_++] = character;
  }

  const size_t columns_;
  std::vector<std::vector<std::string>> rows_;
  size_t row_ = 0, column_ = 0;
  bool has_wrapped_ = false;
};

/// A process whose input, output and errors are a pseudo-terminal of its own. It never outlives the object. Of a
/// program in contained_programs() it is a fork.
class TerminalProcess {
 public:
  using Clock = std::chrono::steady_clock;

  /// `variables` are added to this process's environment; an empty value removes a variable.
  TerminalProcess(std::vector<std::string> command, int columns, const std::map<std::string, std::string>& variables) {
    winsize size{};
    size.ws_col = static_cast<unsigned short>(columns);
    size.ws_row = 24;
    std::vector<char*> argv;
    for (auto& argument : command) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const auto contained = contained_programs().find(command[0]);
    std::cout << std::flush;
    std::fflush(nullptr);  // otherwise the child would print buffered output again
    pid_ = ::forkpty(&master_, nullptr, nullptr, &size);
    if (pid_ < 0) throw std::runtime_error("forkpty: a test needs a pseudo-terminal; mount devpts at /dev/pts");
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (const auto& [name, value] : variables)
        value.empty() ? ::unsetenv(name.c_str()) : ::setenv(name.c_str(), value.c_str(), 1);
      if (contained != contained_programs().end()) std::exit(contained->second({command.begin() + 1, command.end()}));
      ::execvp(argv[0], argv.data());
      ::_exit(127);
    }
    ::fcntl(master_, F_SETFD, FD_CLOEXEC);
  }
  ~TerminalProcess() {
    if (!is_over_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(master_);
  }
  TerminalProcess(const TerminalProcess&) = delete;
  TerminalProcess& operator=(const TerminalProcess&) = delete;

  void resize(int columns, int rows = 24) {
    winsize size{};
    size.ws_col = static_cast<unsigned short>(columns);
    size.ws_row = static_cast<unsigned short>(rows);
    ASSERT_EQ(::ioctl(master_, TIOCSWINSZ, &size), 0);
  }

  int pid() const { return pid_; }

  /// Sends bytes as the keyboard does.
  void type(const std::string& bytes) {
    ASSERT_EQ(::write(master_, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  /// Whether the terminal shows what is typed, and sends it in lines: the state in which a shell wants it back.
  bool is_usual() const {
    termios settings{};
    return ::tcgetattr(master_, &settings) == 0 && (settings.c_lflag & ICANON) != 0 && (settings.c_lflag & ECHO) != 0;
  }

  /// Stops and resumes the terminal's output, as Ctrl-S and Ctrl-Q do.
  void pause() { flow(TCOOFF); }
  void resume() { flow(TCOON); }

  /// Reads until the terminal has got this text. The test fails if it does not get it in time.
  void expect(const std::string& text) { expect_after(0, text); }
  /// The same, in what it has got after so many bytes.
  void expect_after(size_t first, const std::string& text) {
    const auto deadline = Clock::now() + kPatience;
    while (bytes_.find(text, first) == bytes_.npos)
      if (!read_more(deadline)) FAIL() << "no '" << text << "' in the terminal, but:\n" << bytes_;
  }

  /// Reads to the end of the process, and returns its exit code or 128 plus the signal.
  int wait() {
    const auto deadline = Clock::now() + kPatience;
    while (read_more(deadline)) {
    }
    if (Clock::now() >= deadline) ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    is_over_ = true;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  /// Everything that the terminal has got so far.
  const std::string& bytes() const { return bytes_; }

 private:
  static constexpr std::chrono::minutes kPatience{1};

  bool read_more(Clock::time_point deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd ready{master_, POLLIN, 0};
    if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) return false;
    char bytes[4096];
    const auto got = ::read(master_, bytes, sizeof bytes);  // fails after the process has ended
    if (got <= 0) return false;
    bytes_.append(bytes, static_cast<size_t>(got));
    return true;
  }

  void flow(int action) {
    const int terminal = ::open(::ptsname(master_), O_RDWR | O_NOCTTY | O_CLOEXEC);
    ASSERT_GE(terminal, 0);
    EXPECT_EQ(::tcflow(terminal, action), 0);
    ::close(terminal);
  }

  pid_t pid_ = -1;
  int master_ = -1;
  bool is_over_ = false;
  std::string bytes_;
};
