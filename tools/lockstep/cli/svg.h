#pragma once

#include <initializer_list>
#include <string>
#include <vector>

/// Parts of SVG pictures, shared by the plots of the command line. All functions are pure.
namespace lockstep::svg {

struct Point {
  double x, y;
};

/// A position on an axis with its label.
struct Tick {
  double value = 0;
  std::string name{};
  bool operator==(const Tick&) const = default;
};

inline constexpr const char* kInk = "#222222";
inline constexpr const char* kFaint = "#666666";
inline constexpr const char* kGrid = "#e2e2e2";
inline constexpr const char* kPaper = "white";
/// A palette that is suitable for colour-blind readers (Okabe and Ito).
inline constexpr const char* kColours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"};

/// A colour of light mode and its replacement in dark mode.
struct DarkColour {
  const char* light;
  const char* dark;
};

/// The start of a picture: the <svg> tag, the style sheet for dark mode, which browsers apply by the reader's
/// preference, and the background. `colours` are added to the replacements of kInk, kFaint, kGrid, kPaper and the first
/// of kColours; a later entry replaces an earlier one. Browsers show the picture as wide as the window, at most `width`
/// pixels. The caller appends elements and "</svg>\n".
std::string head(double width, double height, std::initializer_list<DarkColour> colours = {});

/// The text without characters that XML reads or forbids. Bytes that are not UTF-8 become U+FFFD.
std::string escaped(const std::string& text);

/// Elements. `style` are attributes.
std::string line(Point from, Point to, const std::string& style);
std::string label(Point at, const std::string& text, const std::string& style);

/// "1.0,2.0 3.0,4.0": the attribute of a polyline.
std::string joined(const std::vector<Point>& points);

/// The letters of a text in UTF-8, each as a string.
std::vector<std::string> letters_of(const std::string& text);

/// The approximate width of a text in a sans-serif font of this size.
double text_width(const std::string& text, double font_size);

/// The largest 1, 2 or 5 times a power of ten that does not exceed `value`, which is above 0.
double rounded_down(double value);
/// The smallest 1, 2 or 5 times a power of ten that is not below `value`.
double rounded_up(double value);

}  // namespace lockstep::svg
