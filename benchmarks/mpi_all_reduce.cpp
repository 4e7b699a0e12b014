// MPI's own all-reduce, for comparison with `lockstep bench all-reduce`: mpirun -n 16 mpi_all_reduce BYTES...
//
// float32 maxima in place; ranks released together, buffers rewritten, the slowest rank counts, medians, results
// checked.

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

double microseconds_of_one(std::vector<float>& data, int rank, int size, int calls) {
  std::fill(data.begin(), data.end(), 0.0f);
  data.front() = data.back() = static_cast<float>(rank + 1);
  MPI_Barrier(MPI_COMM_WORLD);
  double begin = MPI_Wtime();
  for (int call = 0; call < calls; ++call)
    MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(data.size()), MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
  double took = (MPI_Wtime() - begin) / calls * 1e6;
  if (data.front() != static_cast<float>(size) || data.back() != static_cast<float>(size)) {
    std::fprintf(stderr, "wrong result on rank %d\n", rank);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return took;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int argument = 1; argument < argc; ++argument) {
    long bytes = std::atol(argv[argument]);
    std::vector<float> data(static_cast<size_t>(bytes) / sizeof(float));
    const int calls = bytes < 65536 ? 200 : 1;
    std::vector<double> times;
    for (int round = 0; round < 23; ++round) {
      double took = microseconds_of_one(data, rank, size, calls);
      if (round >= 2) times.push_back(took);
    }
    std::sort(times.begin(), times.end());
    if (rank == 0)
      std::printf("MPI_Allreduce, %d ranks, %ld bytes: %.2f us (%.2f to %.2f)\n", size, bytes, times[times.size() / 2],
                  times[times.size() / 10], times[times.size() * 9 / 10]);
  }
  MPI_Finalize();
}
