#include "comm/setup/backend_choice.h"

#include <algorithm>
#include "comm/setup/choose_device.h"

#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "support/messages.h"

namespace lockstep::detail {
namespace {

void expect_names(const std::string& asked, const std::string& cpu, const std::string& cuda) {
  const auto names = parse_backends(asked);
  EXPECT_EQ(names.cpu, cpu) << asked;
  EXPECT_EQ(names.cuda, cuda) << asked;
}

TEST(BackendNames, OneNameIsForTheDeviceThatTheBackendMoves) {
  expect_names("shm", "shm", "");
  expect_names("threads", "threads", "");
  expect_names("auto", "auto", "auto");
#ifdef LOCKSTEP_HAVE_NCCL
  expect_names("nccl", "", "nccl");
  expect_names("cpu:shm,cuda:nccl", "shm", "nccl");
#endif
}

TEST(BackendNames, EachDeviceMayHaveItsOwn) {
  expect_names("cpu:shm", "shm", "");
  expect_names("cpu:shm,cuda:auto", "shm", "auto");
  expect_names("cuda:auto,cpu:threads", "threads", "auto");
}

TEST(BackendNames, WhatMakesNoSenseIsRefusedWithAnExample) {
  for (const char* asked : {"gpu:shm", "cpu:shm,cpu:threads", "cpu:shm,threads", ":"})
    expect_error<UsageError>([&] { parse_backends(asked); }, asked, "cpu:gloo,cuda:nccl");
  expect_error<UsageError>([] { parse_backends("cpu:carrier_pigeon"); }, "no backend 'carrier_pigeon'");
  for (const std::string name : {"gloo", "mpi", "nccl"}) {
    const auto built = available_backends();
    if (std::find(built.begin(), built.end(), name) == built.end())
      expect_error<UsageError>([&] { parse_backends(name); }, "no backend '" + name, "run lockstep doctor");
  }
  expect_error<UsageError>([] { parse_backends("cuda:shm"); }, "shm supports only CPU tensors", "use nccl");
}

TEST(ChooseDevice, ARankTakesTheGpuOfItsLocalRankOrTheOneThatItIsShown) {
  EXPECT_EQ(gpu_of_rank({.visible = 8, .on_host = 8}, 3, 8), 3);
  EXPECT_EQ(gpu_of_rank({.visible = 8, .on_host = 8}, 1, 2), 1);
  EXPECT_EQ(gpu_of_rank({.visible = 1, .on_host = 1}, 0, 1), 0);
  EXPECT_EQ(gpu_of_rank({.visible = 1, .on_host = 8}, 5, 8), 0) << "its own";
  EXPECT_EQ(gpu_of_rank({.visible = 1, .on_host = 1}, 1, 2), std::nullopt) << "shared";
  EXPECT_EQ(gpu_of_rank({.visible = 2, .on_host = 8}, 1, 4), std::nullopt);
  EXPECT_EQ(gpu_of_rank({}, 0, 1), std::nullopt);
}

TEST(ChooseDevice, ADeviceThatTheBackendDoesNotMoveIsRefused) {
  auto join = [](const std::string& backend, c10::Device device) {
    return [=] { init_process_group({.backend = backend, .rank = 0, .world_size = 1, .device = device}); };
  };
  expect_error<UsageError>(join("threads", c10::Device("cuda:0")), "cuda:0",
                           "backend threads does not support that device");
  expect_error<UsageError>(join("auto", c10::Device("xpu:0")), "xpu:0", "cpu and cuda");
#ifndef LOCKSTEP_HAVE_NCCL
  expect_error<UsageError>(join("auto", c10::Device("cuda:0")), "cuda:0", "nccl", "run lockstep doctor");
#endif
}

}  // namespace
}  // namespace lockstep::detail
