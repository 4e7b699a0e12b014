#include "bench/ranks/ddp/python_rank.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace lockstep::bench {
namespace {

/// It lies beside this program.
std::string find_script() {
  char program[PATH_MAX];  // not by std::filesystem: the libtorch.so of some wheels exports a copy of it that crashes
  const ssize_t length = ::readlink("/proc/self/exe", program, sizeof program);
  const std::string_view path(program, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return fmt::format("{}/python_rank.py", path.substr(0, path.rfind('/')));
}

}  // namespace

PythonRank::PythonRank(const Options& options)
    : process_(
          fmt::format("rank {} of PyTorch's own", options.rank),
          {options.python, find_script(), options.store, std::to_string(options.rank), std::to_string(options.ranks),
           options.has_mkldnn ? "mkldnn" : "no-mkldnn", fmt::format("{}", fmt::join(options.cores, ","))}) {
  process_.await_answer();
}

}  // namespace lockstep::bench
