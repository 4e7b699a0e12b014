#include "top/full_screen.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include <lockstep/error.h>

#include "base/live_line.h"

namespace lockstep::top {
namespace {

constexpr const char* kEnter = "\033[?1049h\033[?25l\033[2J";  // alternate screen, no cursor, empty
constexpr const char* kLeave = "\033[0m\033[?25h\033[?1049l";
constexpr size_t kMaxCells = 1000;

[[noreturn]] void refuse_terminal(const char* call) {
  throw SystemError(fmt::format("the terminal cannot be used: {}: {}. Use --once.", call, std::strerror(errno)));
}

sigset_t handled_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH}) ::sigaddset(&set, number);
  return set;
}

}  // namespace

FullScreen::FullScreen() {
  if (::tcgetattr(STDIN_FILENO, &saved_termios_) != 0) refuse_terminal("tcgetattr");
  const auto handled = handled_signals();
  ::pthread_sigmask(SIG_BLOCK, &handled, &saved_mask_);
  signals_ = FileDescriptor(::signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.is_open()) {
    ::pthread_sigmask(SIG_SETMASK, &saved_mask_, nullptr);
    refuse_terminal("signalfd");
  }
  enter();
}

FullScreen::~FullScreen() {
  leave();
  ::pthread_sigmask(SIG_SETMASK, &saved_mask_, nullptr);
}

void FullScreen::enter() {
  termios raw = saved_termios_;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);  // ISIG stays: Ctrl-C is a signal
  raw.c_cc[VMIN] = 1;
  raw.c_cc[VTIME] = 0;
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
  write_fully(STDOUT_FILENO, kEnter);
}

void FullScreen::leave() {
  ::tcflow(STDOUT_FILENO, TCOON);  // after Ctrl-S, writing would block
  write_fully(STDOUT_FILENO, kLeave);
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &saved_termios_);
}

FullScreen::Event FullScreen::wait(std::chrono::milliseconds limit) {
  Event event;
  pollfd ready[] = {{STDIN_FILENO, POLLIN, 0}, {signals_.get(), POLLIN, 0}};
  if (::poll(ready, 2, static_cast<int>(std::max<int64_t>(0, limit.count()))) <= 0) return event;
  if ((ready[1].revents & POLLIN) != 0) read_signals(event);
  if (ready[0].revents == 0) return event;
  char bytes[256];
  const auto got = ::read(STDIN_FILENO, bytes, sizeof bytes);
  if (got > 0)
    event.keys.assign(bytes, static_cast<size_t>(got));
  else if (got == 0 || (errno != EINTR && errno != EAGAIN))
    event.end_signal = event.end_signal == 0 ? SIGHUP : event.end_signal;
  return event;
}

void FullScreen::read_signals(Event& event) {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == sizeof info) {
    const auto number = static_cast<int>(info.ssi_signo);
    if (number == SIGTSTP) {
      leave();
      ::raise(SIGSTOP);  // until SIGCONT
      enter();
    }
    if (number == SIGTSTP || number == SIGWINCH)
      event.is_resized = true;
    else
      event.end_signal = number;
  }
}

Style FullScreen::size(Style style) const {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size = {24, 80, 0, 0};
  style.columns = std::clamp<size_t>(size.ws_col, 1, kMaxCells);
  style.rows = std::clamp<size_t>(size.ws_row, 1, kMaxCells);
  return style;
}

bool FullScreen::draw(const std::vector<std::string>& lines) {
  pollfd ready{STDOUT_FILENO, POLLOUT, 0};
  if (::poll(&ready, 1, 0) != 1) return true;
  if ((ready.revents & POLLOUT) == 0) return false;
  std::string text = "\033[H";
  for (size_t i = 0; i < lines.size(); ++i) text += lines[i] + "\033[K" + (i + 1 < lines.size() ? "\r\n" : "\033[J");
  return write_fully(STDOUT_FILENO, text);
}

}  // namespace lockstep::top
