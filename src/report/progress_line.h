#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

#include "report/progress_state.h"

namespace lockstep {

struct LineStyle {
  size_t columns = 80;  // the most that the line may take
  bool has_colour = false;
  bool has_unicode = false;
};

/// Returns one line for a terminal:
///
///     epoch 3/20  120/469  ━━━━━━━╸──────────────────  26 %  loss 0.4321  lr 0.1  12.3k samples/s  data 3 %  eta 0:41
///
/// If the line is too long, the bar shrinks first, down to 8 columns. Then parts are dropped, in this order:
/// percentage, waiting for data, values from the last to the second, rate, bar, time left, first value, title. The
/// remaining number of steps is cut off if it is still too long. The line of a bar that has ended has the elapsed time
/// instead of the bar.
std::string render_live(const ProgressView& view, const LineStyle& style);

/// Returns one line for a file, without escape sequences and of any length:
///
///     epoch 3/20  step 120/469  loss 0.4321  lr 0.1  12300 samples/s  data 3 %  eta 0:41
std::string render_plain(const ProgressView& view);

/// Returns the columns that UTF-8 text takes in a terminal; escape sequences (ESC [ ... letter) take none.
size_t display_width(std::string_view text);
/// Returns the text with a space for every control character, which would move the cursor.
std::string printable(std::string_view text);

/// Returns a number with four significant digits, or all digits before the point. With `keeps_zeros` also zeros at its
/// end: "0.4300".
std::string format_value(double value, bool keeps_zeros);
/// "12.3k": three significant digits.
std::string format_short(double value);
/// "0:41", "1:02:03" or "2d 03:04", rounded to seconds or minutes.
std::string format_duration(std::chrono::nanoseconds duration);

}  // namespace lockstep
