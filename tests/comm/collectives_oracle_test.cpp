// The collectives that exist in few backends of torch.distributed give what they give there.

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <gtest/gtest.h>

#include <lockstep/run_threads.h>

#include "support/temporary_folder.h"

namespace lockstep {
namespace {

constexpr int kRanks = 3;

at::Tensor values(int rank, int64_t count) {
  return at::arange(count, at::kFloat) * 0.5 + 100 * rank;
}

int64_t rows(int sender, int receiver) {
  return (sender * 3 + receiver * 2) % 5;
}

using Results = std::map<std::string, std::vector<float>>;  // by call

std::vector<float> floats(const at::Tensor& tensor) {
  const auto flat = tensor.contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

Results make_calls(const ProcessGroup& world) {
  const int me = world.rank();
  Results results;
  Splits splits;
  int64_t sent = 0, received = 0;
  for (int other = 0; other < kRanks; ++other) {
    splits.input.push_back(rows(me, other));
    splits.output.push_back(rows(other, me));
    sent += rows(me, other);
    received += rows(other, me);
  }
  auto output = at::zeros({received, 2});
  world.all_to_all(output, values(me, 2 * sent).view({-1, 2}), splits);
  results["all_to_all_single"] = floats(output);
  output = at::zeros({2 * kRanks});
  world.all_to_all(output, values(me, 2 * kRanks));
  results["all_to_all_equal"] = floats(output);

  const std::vector<at::Tensor> several{values(me, 4), values(me, 1), values(me, 9)};
  world.all_reduce_coalesced(several);
  results["all_reduce_coalesced"] = floats(at::cat(several));

  const int after = (me + 1) % kRanks, before = (me + kRanks - 1) % kRanks;
  const auto halo = at::zeros({2, 5});
  world.exchange({Message::send(values(me, 5), after), Message::recv(halo[0], before),
                  Message::send(values(me, 5) + 1, before), Message::recv(halo[1], after)});
  results["batch_isend_irecv"] = floats(halo);

  const auto part = at::zeros({std::vector<int64_t>{0, 4, 7}[me]});
  world.reduce_scatter(part, {values(me, 0), values(me, 4), values(me, 7)});
  results["reduce_scatter"] = floats(part);

  c10::IValue object = std::make_tuple("from " + std::to_string(me), int64_t{me});
  if (me == 0) world.send_object(object, 1);
  if (me == 1) object = world.recv_object(0);
  const auto& fields = object.toTuple()->elements();
  results["send_object_list"] = {static_cast<float>(fields[1].toInt()),
                                 static_cast<float>(fields[0].toStringRef().size())};

  auto one = at::ones({1});
  if (me < 2) world.send(one, 2);
  if (me == 2) {
    std::vector<float> senders{static_cast<float>(world.recv_any(one)), static_cast<float>(world.recv_any(one))};
    std::sort(senders.begin(), senders.end());
    results["recv_any"] = senders;
  }
  world.barrier();
  return results;
}

class CollectivesOfPython : public testing::TestWithParam<const char*> {};

TEST_P(CollectivesOfPython, GiveTheSame) {
  const char* python = std::getenv(GetParam());
  if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set " << GetParam();
  const TemporaryFolder folder;
  const auto out = (folder.path() / "out").string();
  const auto command = "'" + std::string(python) +
                       "' -W ignore '" LOCKSTEP_TEST_SOURCE_DIR "/comm/collectives_oracle.py' >'" + out + "'";
  ASSERT_EQ(std::system(command.c_str()), 0) << command;

  std::vector<Results> ours(kRanks);
  run_threads(kRanks, [&](ProcessGroup world) { ours[world.rank()] = make_calls(world); });
  std::ifstream answers(out);
  int compared = 0;
  for (std::string line; std::getline(answers, line); ++compared) {
    std::istringstream words(line);
    int rank = 0;
    std::string call;
    words >> rank >> call;
    ASSERT_TRUE(ours.at(rank).contains(call)) << line;
    EXPECT_EQ(ours[rank][call], std::vector<float>(std::istream_iterator<float>(words), {})) << line;
  }
  EXPECT_GE(compared, 16) << "3 ranks with 5 calls each, and recv_any on rank 2";
}

INSTANTIATE_TEST_SUITE_P(With, CollectivesOfPython, testing::Values("LOCKSTEP_TEST_PYTHON", "LOCKSTEP_TEST_PYTHON_2X"),
                         [](const auto& info) {
                           return std::string(info.param).ends_with("2X") ? "Torch2" : "Torch1";
                         });

}  // namespace
}  // namespace lockstep
