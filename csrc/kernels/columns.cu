// The second half of sums down the columns: adds the partial sums of the groups of threads in a fixed order.
#include "columns.h"

#include "launch.cuh"
#include "pack.cuh"

namespace megatrain {

constexpr int COLUMN_SUM_WIDTH = 32;
constexpr int COLUMN_SUM_HEIGHT = 16;

// A block handles 32 columns.
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

template <typename T>
cudaError_t launch_column_sum(cudaStream_t stream, const wide_t<T>* parts, T* out, int64_t num_parts, int64_t columns) {
  return launch(stream, column_sum<T>, divide_up(columns, COLUMN_SUM_WIDTH), dim3(COLUMN_SUM_WIDTH, COLUMN_SUM_HEIGHT), parts, out,
                num_parts, columns);
}

#define INSTANTIATE(T) template cudaError_t launch_column_sum<T>(cudaStream_t, const wide_t<T>*, T*, int64_t, int64_t);
MEGATRAIN_FOR_FLOATING(INSTANTIATE)

}  // namespace megatrain
