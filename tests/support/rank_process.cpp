#include "support/rank_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <stdexcept>

#include <gtest/gtest.h>

extern char** environ;

namespace {

std::vector<std::string> environment_with(const std::map<std::string, std::string>& variables) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    std::string_view text(*entry);
    if (!variables.contains(std::string(text.substr(0, text.find('='))))) result.emplace_back(text);
  }
  for (const auto& [name, value] : variables)
    if (!value.empty()) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

/// Emulates exec: sets the environment and closes the descriptors that exec would close.
void act_as_started(const std::vector<std::string>& environment) {
  ::clearenv();
  for (const auto& entry : environment)
    ::setenv(entry.substr(0, entry.find('=')).c_str(), entry.substr(entry.find('=') + 1).c_str(), 1);
  std::vector<int> descriptors;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    descriptors.push_back(std::stoi(entry.path().filename()));
  for (int descriptor : descriptors)
    if (int flags = ::fcntl(descriptor, F_GETFD); flags >= 0 && (flags & FD_CLOEXEC) != 0) ::close(descriptor);
}

int milliseconds_until(RankProcess::Clock::time_point deadline) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - RankProcess::Clock::now()).count();
  return static_cast<int>(std::max<int64_t>(left, 0));
}

}  // namespace

std::map<std::string, ProgramFunction>& contained_programs() {
  static std::map<std::string, ProgramFunction> programs;
  return programs;
}

RankProcess::RankProcess(const std::vector<std::string>& command, const std::map<std::string, std::string>& variables) {
  int to_child[2];
  int from_child[2];
  if (::pipe2(to_child, O_CLOEXEC) != 0 || ::pipe2(from_child, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  auto arguments = command;
  auto environment = environment_with(variables);
  auto argv = pointers(arguments);
  auto envp = pointers(environment);
  const auto contained = contained_programs().find(command[0]);
  std::cout << std::flush;
  std::fflush(nullptr);  // otherwise the child would print buffered output again
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(to_child[0], 0);
    ::dup2(from_child[1], 1);
    ::dup2(from_child[1], 2);
    if (contained != contained_programs().end()) {
      act_as_started(environment);
      std::exit(contained->second({command.begin() + 1, command.end()}));
    }
    ::execvpe(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(to_child[0]);
  ::close(from_child[1]);
  in_ = to_child[1];
  out_ = from_child[0];
}

RankProcess::~RankProcess() {
  if (!status_) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::close(in_);
  ::close(out_);
}

bool RankProcess::read_more(Clock::time_point deadline) {
  pollfd ready{out_, POLLIN, 0};
  if (::poll(&ready, 1, milliseconds_until(deadline)) <= 0) return false;
  char bytes[4096];
  ssize_t got = ::read(out_, bytes, sizeof bytes);
  if (got <= 0) return false;
  output_.append(bytes, static_cast<size_t>(got));
  return true;
}

std::string RankProcess::expect_line(const std::string& beginning, std::chrono::milliseconds limit) {
  auto deadline = Clock::now() + limit;
  for (;;) {
    for (size_t end; (end = output_.find('\n', looked_at_)) != std::string::npos;) {
      std::string line = output_.substr(looked_at_, end - looked_at_);
      looked_at_ = end + 1;
      if (line.starts_with(beginning)) return line;
    }
    if (!read_more(deadline)) break;
  }
  ADD_FAILURE() << "pid " << pid_ << " did not print '" << beginning << "' within " << limit.count()
                << " ms; it printed:\n"
                << output_;
  return "";
}

void RankProcess::say(const std::string& line) {
  std::string text = line + "\n";
  ASSERT_EQ(::write(in_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

void RankProcess::signal(int number) {
  ASSERT_EQ(::kill(pid_, number), 0) << std::strerror(errno);
}

int RankProcess::wait(std::chrono::milliseconds limit) {
  auto deadline = Clock::now() + limit;
  while (read_more(deadline)) {
  }
  // Its streams are closed, so the process has ended or is about to end.
  for (int status = 0; !status_;) {
    if (::waitpid(pid_, &status, WNOHANG) == pid_)
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    else if (Clock::now() > deadline)
      break;
    else
      ::poll(nullptr, 0, 5);
  }
  if (!status_) ADD_FAILURE() << "pid " << pid_ << " is still running; it printed:\n" << output_;
  return status_.value_or(-1);
}

JobProcesses::JobProcesses(std::string program, int world_size, std::vector<std::string> arguments,
                           std::map<std::string, std::string> variables)
    : program_(std::move(program)),
      world_size_(world_size),
      arguments_(std::move(arguments)),
      port_(free_port()),
      variables_(std::move(variables)) {}

RankProcess& JobProcesses::start(int rank) {
  std::vector<std::string> command{program_};
  command.insert(command.end(), arguments_.begin(), arguments_.end());
  std::map<std::string, std::string> variables{{"RANK", std::to_string(rank)},
                                               {"WORLD_SIZE", std::to_string(world_size_)},
                                               {"MASTER_ADDR", "127.0.0.1"},
                                               {"MASTER_PORT", std::to_string(port_)}};
  for (const auto& [name, value] : variables_) variables[name] = value;
  if (auto found = ranks_.find(rank); found != ranks_.end()) replaced_.push_back(std::move(found->second));
  return *(ranks_[rank] = std::make_unique<RankProcess>(command, variables));
}

void JobProcesses::start_all() {
  for (int rank = 0; rank < world_size_; ++rank) start(rank);
}

int free_port() {
  int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(socket, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw std::runtime_error("no free port");
  ::close(socket);
  return ntohs(address.sin_port);
}
