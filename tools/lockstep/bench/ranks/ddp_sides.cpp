#include "bench/ranks/ddp_sides.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bench/ranks/ddp_training.h"

namespace lockstep::bench {
namespace {

void train(const TrainingSample& work) {
  for (int step = 0; step < work.steps; ++step) work.training.step(work.batch);
}

/// Returns the path of the script, which is in the folder of this program.
std::string find_script() {
  char program[PATH_MAX];  // std::filesystem is avoided: the libtorch.so of some wheels exports a copy of it that
                           // crashes
  const ssize_t length = ::readlink("/proc/self/exe", program, sizeof program);
  const std::string_view path(program, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return fmt::format("{}/python_rank.py", path.substr(0, path.rfind('/')));
}

}  // namespace

void TogetherSide::run() {
  train(work_);
}

int64_t TogetherSide::count_wrong() {
  return check_ == Check::kNone ? 0 : count_diverged(work_.training.parameters(), page_);
}

void AloneSide::prepare(int64_t) {
  if (page_.rank() == 0) work_.training.reset();
}

void AloneSide::warm_up() {
  if (page_.rank() == 0) work_.training.step(work_.batch);
}

void AloneSide::run() {
  if (page_.rank() == 0) train(work_);
  page_.sleeping_barrier();
}

PythonRank::PythonRank(const Options& options)
    : process_(
          fmt::format("Python rank {}", options.rank),
          {options.python, find_script(), options.store, std::to_string(options.rank), std::to_string(options.ranks),
           options.has_mkldnn ? "mkldnn" : "no-mkldnn", fmt::format("{}", fmt::join(options.cores, ","))}) {
  process_.read_answer();
}

}  // namespace lockstep::bench
