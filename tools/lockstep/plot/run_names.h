#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::plot {

/// Names of runs for the legend, from the paths of their folders or files: the last part of each path, or as many parts
/// as are needed to tell the runs apart. A file metrics.jsonl has the name of its folder. Paths that are equal get
/// equal names. Pure, except that relative paths are those of the current folder.
std::vector<std::string> names_of_runs(const std::vector<std::string>& paths);

/// A name with more than `most_letters` letters is shortened in the middle: "resnet…seed0". `most_letters` is 3 or
/// more. Pure.
std::string shortened(const std::string& name, size_t most_letters);

/// The same for several names. Text that all names begin with is left out first, except for its beginning:
/// "resnet…lr0.1-seed0". Names that differ stay different: if needed, all keep more letters. Pure.
std::vector<std::string> shortened_distinctly(const std::vector<std::string>& names, size_t most_letters);

}  // namespace lockstep::plot
