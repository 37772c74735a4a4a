// Kernels over [rows, columns] where each column has its own bias or sum.
#pragma once

#include <cstdint>

#include "pack.cuh"

namespace megatrain {

// How threads are assigned: a thread keeps one pack of columns and walks down the rows, several at a time, so that
// their loads are in flight together.
constexpr int WALK_ROWS = 4;        // rows at a time: 64 bytes for each thread and tensor in flight
constexpr int WALK_THREADS = 128;   // threads of a block: few, so that a block fits most numbers of columns
constexpr int WALK_MIN_BLOCKS = 4;  // blocks of a multiprocessor: leaves each thread 128 registers

struct ColumnWalk {
  int64_t rows;
  int64_t columns;
  int tiles;  // blocks side by side; the grid has this number for each band of rows
};

template <int WIDTH>
struct Stand {
  int64_t column;      // the first column of the thread's pack
  int64_t group;       // the thread's group; the groups divide the rows among themselves
  int64_t num_groups;

  __device__ __forceinline__ explicit Stand(const ColumnWalk& walk)
      : column((int64_t(blockIdx.x % walk.tiles) * blockDim.x + threadIdx.x) * WIDTH),
        group(int64_t(blockIdx.x / walk.tiles) * blockDim.y + threadIdx.y),
        num_groups(int64_t(gridDim.x / walk.tiles) * blockDim.y) {}
};

// The second half of sums down the columns: adds the partial sums of the groups of threads in a fixed order.
constexpr int COLUMN_SUM_WIDTH = 32;
constexpr int COLUMN_SUM_HEIGHT = 16;

// out[column] = sum over `num_parts` rows of parts [num_parts, num_columns]. A block handles 32 columns.
template <typename T>
__global__ void __launch_bounds__(COLUMN_SUM_WIDTH* COLUMN_SUM_HEIGHT)
    column_sum(const wide_t<T>* parts, T* out, int64_t num_parts, int64_t num_columns) {
  using A = wide_t<T>;
  __shared__ A sums[COLUMN_SUM_HEIGHT][COLUMN_SUM_WIDTH];
  const int64_t column = int64_t(blockIdx.x) * COLUMN_SUM_WIDTH + threadIdx.x;
  A sum = 0;
  if (column < num_columns) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < num_parts; part += COLUMN_SUM_HEIGHT) sum += parts[part * num_columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= num_columns) return;
  for (int y = 1; y < COLUMN_SUM_HEIGHT; ++y) sum += sums[y][threadIdx.x];
  out[column] = narrow<T>(sum);
}

}  // namespace megatrain
