// A rank of the tests in mpi_test.cpp, started by mpirun: test_ranks mpi_rank SCENARIO. It prints what it comes to, one
// line each, and ends with "done" and 0, or the error it was given and 3.

#include <functional>
#include <map>
#include <optional>
#include <stdexcept>

#include <ATen/ATen.h>

#include <lockstep/lockstep.h>

#include "backends/mpi/mpi.h"
#include "ranks/test_ranks.h"

namespace {

using lockstep::ProcessGroup;
using std::chrono::milliseconds;

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

ProcessGroup join(const char* backend = "mpi") {
  return lockstep::init_process_group({.backend = backend, .timeout = milliseconds(20000)});
}

double sum_over(const ProcessGroup& group, double value) {
  auto tensor = at::full({3}, value);
  group.all_reduce(tensor);
  return tensor[2].item<double>();
}

// The program's own messages are under way while lockstep makes its groups and calls.
void began_mpi_itself() {
  int level = 0, me = 0, size = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  int next = (me + 1) % size, previous = (me + size - 1) % size;
  int received = -1;
  MPI_Request request;
  MPI_Irecv(&received, 1, MPI_INT, previous, 0, MPI_COMM_WORLD, &request);
  {
    auto world = join();
    require(sum_over(world, 1) == size, "wrong sum");
    MPI_Send(&me, 1, MPI_INT, next, 0, MPI_COMM_WORLD);
    require(sum_over(world, 2) == 2 * size, "wrong second sum");
  }
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  require(received == previous, "the program's own message was disturbed");
  MPI_Finalize();
}

void began_mpi_without_threads() {
  MPI_Init(nullptr, nullptr);
  join();
}

void ended_mpi() {
  int level = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  MPI_Finalize();
  join();
}

// Rank 2 never begins MPI.
void only_some_use_mpi() {
  auto world = join("gloo");
  world.new_group({0, 1}, {.backend = "mpi", .timeout = milliseconds(1500)});
}

std::optional<ProcessGroup> the_world;  // is destroyed after all that exit() was told to do

void group_in_a_static_variable() {
  the_world = join();
  require(sum_over(*the_world, 1) == the_world->size(), "wrong sum");
}

// The message is so long that it moves only when the sender lets MPI work, which waits elsewhere.
void message_while_the_sender_waits_elsewhere() {
  auto world = join();
  auto tensor = at::full({8 << 20}, 7.0);
  if (world.rank() == 0) {
    auto sent = world.send_async(tensor, 1);
    world.monitored_barrier();
    sent.wait();
  } else {
    world.recv(tensor.zero_(), 0);
    world.monitored_barrier();
  }
  require(at::equal(tensor, at::full_like(tensor, 7.0)), "wrong message");
}

// A receive that nobody waits for is taken back: a message that comes later is another's.
void dropped_message() {
  auto world = join();
  auto dropped = at::zeros({4}), received = at::zeros({4});
  if (world.rank() == 0) {
    { auto work = world.recv_async(dropped, 1, 9); }
    require(sum_over(world, 1) == 2, "the group is broken");
    world.recv(received, 1, 8);
    require(at::equal(received, at::full({4}, 5.0)), "wrong message");
    require(at::equal(dropped, at::zeros({4})), "memory of the receive that was dropped has changed");
  } else {
    require(sum_over(world, 1) == 2, "the group is broken");
    world.send(at::full({4}, 5.0), 0, 8);
  }
}

void tag_too_large() {
  auto world = join();
  world.rank() == 0 ? world.send(at::ones({1}), 1, 65536) : world.recv(at::ones({1}), 0, 65536);
}

// Of equal size but another dtype, so that only the fingerprint tells them apart.
void messages_of_other_dtypes() {
  auto world = join();
  auto received = at::zeros({4}, at::kInt);
  try {
    world.rank() == 0 ? world.send(at::ones({4}), 1) : world.recv(received, 0);
  } catch (const lockstep::MismatchError& error) {
    print_line(std::string("MismatchError: ") + error.what());
  }
  require(at::equal(received, at::zeros({4}, at::kInt)), "data has moved");
}

// Each sends, and none would receive: nobody waits for the other unless sends do.
void broadcasts_of_other_roots() {
  auto world = join();
  auto data = at::full({6}, world.rank() + 1.0);
  auto before = data.clone();
  try {
    world.broadcast(data, world.rank());
  } catch (const lockstep::MismatchError& error) {
    print_line(std::string("MismatchError: ") + error.what());
  }
  require(at::equal(data, before), "data has moved");
}

const std::map<std::string, std::function<void()>> kMpiScenarios{
    {"began_mpi_itself", began_mpi_itself},
    {"began_mpi_without_threads", began_mpi_without_threads},
    {"ended_mpi", ended_mpi},
    {"only_some_use_mpi", only_some_use_mpi},
    {"group_in_a_static_variable", group_in_a_static_variable},
    {"message_while_the_sender_waits_elsewhere", message_while_the_sender_waits_elsewhere},
    {"dropped_message", dropped_message},
    {"tag_too_large", tag_too_large},
    {"messages_of_other_dtypes", messages_of_other_dtypes},
    {"broadcasts_of_other_roots", broadcasts_of_other_roots},
};

}  // namespace

int run_mpi_rank(const std::vector<std::string>& arguments) try {
  kMpiScenarios.at(arguments.at(0))();
  print_line("done");
  return 0;
} catch (const lockstep::UsageError& error) {
  print_line(std::string("UsageError: ") + error.what());
  return 3;
} catch (const std::exception& error) {
  print_line(std::string("error: ") + error.what());
  return 3;
}
