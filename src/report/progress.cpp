#include <lockstep/progress.h>

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <utility>

#include <lockstep/error.h>
#include <lockstep/print.h>

#include "base/live_line.h"
#include "base/owner_process.h"
#include "base/text.h"
#include "base/variables.h"
#include "report/progress_line.h"
#include "report/progress_state.h"

namespace lockstep {
namespace {

constexpr int kUsualColumns = 80;
constexpr int kMaxColumns = 1 << 16;  // as many as a terminal can report

using LiveStyle = LiveLine::Style;

}  // namespace

namespace detail {

/// The terminal that shows this process's standard output.
struct ProgressTerminal {
  LiveStyle style = LiveStyle::kReturn;
  int columns_at_launch = kUsualColumns;  // of a launcher's terminal
  bool has_colour = false;

  /// Returns the columns that a line may take. Two stay empty, for the "^C" or "^Z" that a terminal echoes.
  size_t columns() const {
    int columns = columns_at_launch;
    if (style != LiveStyle::kReturn) {
      winsize size{};
      columns = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsualColumns;
    }
    return static_cast<size_t>(std::max(columns - 2, 1));
  }
};

}  // namespace detail

namespace {

using detail::ProgressTerminal;

std::optional<ProgressTerminal> find_terminal() {
  const bool is_dumb = process_variable("TERM") == "dumb";
  const bool may_colour = !is_dumb && process_variable("NO_COLOR").value_or("").empty();
  if (::isatty(STDOUT_FILENO))
    return ProgressTerminal{is_dumb ? LiveStyle::kSpaces : LiveStyle::kEscapes, kUsualColumns, may_colour};
  const auto columns = read_number(process_variable, "LOCKSTEP_TERMINAL", 1, kMaxColumns);
  struct stat status {};
  const bool is_pipe = ::fstat(STDOUT_FILENO, &status) == 0 && S_ISFIFO(status.st_mode);
  if (!columns || !is_pipe) return std::nullopt;  // not a pipe: the launcher does not get this output
  return ProgressTerminal{LiveStyle::kReturn, *columns, may_colour};
}

/// Reads the environment, not the locale of the process, which is "C" unless the program calls setlocale().
bool has_unicode_locale() {
  for (const char* variable : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    auto locale = process_variable(variable).value_or("");
    if (locale.empty()) continue;
    std::transform(locale.begin(), locale.end(), locale.begin(), [](unsigned char c) { return std::tolower(c); });
    return locale.find("utf-8") != locale.npos || locale.find("utf8") != locale.npos;
  }
  return false;
}

}  // namespace

class Progress::Impl {
 public:
  explicit Impl(const ProgressOptions& options) : interval_(options.line_interval) {
    using Output = ProgressOptions::Output;
    if (options.output == Output::kLines) return;
    terminal_ = find_terminal();
    if (options.output == Output::kTerminal && !terminal_) terminal_.emplace();
  }

  ~Impl() {
    try {
      end({});
    } catch (...) {
      // Out of memory: the last line is not shown.
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void begin(std::string title, int64_t total, int64_t done) {
    end({});
    if (!owner_.is_this()) return;
    const auto now = Clock::now();
    state_.begin(std::move(title), total, done, now);
    has_bar_ = true;
    if (!terminal_) return void(next_draw_ = now + interval_);
    LiveLine::of_process().begin(this, terminal_->style);
    if (now >= next_draw_) draw(now);
  }

  void advance(int64_t steps) {
    const auto now = Clock::now();
    if (state_.advance(steps, now) && now >= next_draw_) draw(now);
  }

  void end(std::string_view summary) {
    if (!has_bar_ || !owner_.is_this()) return;
    has_bar_ = false;
    std::string last(summary);
    if (summary.empty()) {
      const auto view = state_.final_view(Clock::now());
      last = terminal_ ? render_live(view, line_style()) : render_plain(view);
    }
    if (terminal_) LiveLine::of_process().end(this);
    detail::print_line(std::move(last));
  }

  ProgressState& state() { return state_; }

 private:
  using Clock = std::chrono::steady_clock;

  LineStyle line_style() const { return {terminal_->columns(), terminal_->has_colour, has_unicode_}; }

  void draw(Clock::time_point now) {
    if (!owner_.is_this()) return;
    next_draw_ = now + (terminal_ ? std::chrono::milliseconds(ProgressState::kTick) : interval_);
    if (!terminal_) return detail::print_line(render_plain(state_.view()));
    auto line = render_live(state_.view(), line_style());
    const auto columns = display_width(line);
    LiveLine::of_process().show(this, std::move(line), columns);
  }

  const OwnerProcess owner_{};                // a forked child shows no progress
  const std::chrono::milliseconds interval_;  // between plain lines
  const bool has_unicode_ = has_unicode_locale();
  std::optional<ProgressTerminal> terminal_;  // constant after construction; none: plain lines
  bool has_bar_ = false;
  Clock::time_point next_draw_{};
  ProgressState state_;
};

Progress::Progress(const ProcessGroup& group, ProgressOptions options) {
  if (options.line_interval.count() < 0)
    throw UsageError(
        text("ProgressOptions::line_interval is ", options.line_interval.count(), " ms: it must be 0 or more"));
  if (group.rank() == 0 && options.output != ProgressOptions::Output::kOff) impl_ = std::make_unique<Impl>(options);
}

Progress::~Progress() = default;

void Progress::begin(std::string title, int64_t total, int64_t done) {
  if (total < 0 || done < 0)
    throw UsageError(text("Progress::begin: total is ", total, " and done is ", done,
                          ": both must be 0 or more; a total of 0 is unknown"));
  has_bar_ = true;
  if (impl_) impl_->begin(std::move(title), total, done);
}

void Progress::advance(int64_t steps) {
  if (!has_bar_ || steps < 0) refuse_steps(steps);
  if (impl_) impl_->advance(steps);
}

void Progress::refuse_steps(int64_t steps) const {
  if (steps < 0) throw UsageError(text("Progress::advance: steps is ", steps, ": it must be 0 or more"));
  throw UsageError("Progress::advance: there is no bar; call begin() first");
}

void Progress::add_samples(int64_t samples) {
  if (impl_) impl_->state().add_samples(samples);
}

void Progress::add_waiting(std::chrono::nanoseconds waited) {
  if (impl_) impl_->state().add_waiting(waited);
}

void Progress::set(std::string_view name, double value) {
  if (impl_) impl_->state().set(name, value);
}

void Progress::end(std::string_view summary) {
  has_bar_ = false;
  if (impl_) impl_->end(summary);
}

}  // namespace lockstep
