#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>

/// A forked process that exchanges lines with the test. It is killed when the object is destroyed or the test ends.
/// Construct it while the test has no other threads.
class ChildProcess {
 public:
  /// The child's end of the connection to the test.
  class Parent {
   public:
    Parent(int in, int out) : in_(in), out_(out) {}
    void write_line(const std::string& line) const { write_to(out_, line); }
    /// Returns an empty string after the test's end_input().
    std::string read_line() const { return read_from(in_, std::chrono::minutes(5)); }

   private:
    int in_, out_;
  };

  explicit ChildProcess(const std::function<void(const Parent&)>& body) {
    int down[2], up[2];
    if (::pipe(down) != 0 || ::pipe(up) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("fork");
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(down[1]);
      ::close(up[0]);
      int code = 1;
      try {
        body(Parent(down[0], up[1]));
        code = 0;
      } catch (const std::exception& error) {
        write_to(up[1], error.what());
      }
      ::_exit(code);
    }
    ::close(down[0]);
    ::close(up[1]);
    in_ = up[0];
    out_ = down[1];
  }

  ~ChildProcess() {
    kill(SIGKILL);
    wait();
    end_input();
    ::close(in_);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void write_line(const std::string& line) const { write_to(out_, line); }
  /// Returns an empty string if no line arrives in time.
  std::string read_line(std::chrono::milliseconds limit = std::chrono::seconds(20)) const {
    return read_from(in_, limit);
  }

  /// Closes the child's input: its read_line() returns an empty string from now on.
  void end_input() {
    if (out_ >= 0) ::close(out_);
    out_ = -1;
  }

  void kill(int signal) const {
    if (!is_over_) ::kill(pid_, signal);
  }

  /// Blocks until the child ends and returns its waitpid status.
  int wait() {
    if (!is_over_) ::waitpid(pid_, &status_, 0);
    is_over_ = true;
    return status_;
  }

 private:
  static void write_to(int file, const std::string& line) {
    const std::string bytes = line + "\n";
    [[maybe_unused]] auto written = ::write(file, bytes.data(), bytes.size());
  }

  static std::string read_from(int file, std::chrono::milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    std::string line;
    for (char byte = 0;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      pollfd ready{file, POLLIN, 0};
      if (left.count() <= 0 || ::poll(&ready, 1, static_cast<int>(left.count())) <= 0) return "";
      if (::read(file, &byte, 1) != 1 || byte == '\n') return line;
      line += byte;
    }
  }

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1, status_ = 0;
  bool is_over_ = false;
};
