// What MPI takes for the same: the peer of engine_benchmark's table in docs/performance.md.
//
//   mpicxx -O2 benchmarks/mpi_allreduce.cc -o build/mpi_allreduce
//   mpirun -n 2 build/mpi_allreduce
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (long bytes = 16; bytes <= 256 << 20; bytes *= 4) {
    std::vector<float> input(bytes / sizeof(float), 1.0f), output(input.size());
    const int calls = static_cast<int>(std::clamp((64l << 20) / bytes, 5l, 2000l));
    auto call = [&] {
      MPI_Allreduce(input.data(), output.data(), static_cast<int>(input.size()), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    };
    for (int i = 0; i < 5; ++i) call();
    std::vector<double> rounds_us;
    for (int round = 0; round < 9; ++round) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin_s = MPI_Wtime();
      for (int i = 0; i < calls; ++i) call();
      rounds_us.push_back((MPI_Wtime() - begin_s) / calls * 1e6);
    }
    std::sort(rounds_us.begin(), rounds_us.end());
    if (rank == 0) std::printf("%10ld bytes %12.2f us\n", bytes, rounds_us[4]);
  }
  MPI_Finalize();
}
