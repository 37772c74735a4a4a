// The kernels of square_sum.h, and their launches.
#include "square_sum.h"

#include "launch.cuh"
#include "pack.cuh"
#include "row_sum.cuh"

namespace megatrain {

constexpr int SQUARE_SUM_THREADS = 256;
constexpr int SQUARE_SUM_PACKS = 4;  // packs in flight: 64 bytes for each thread
constexpr int ADD_PARTS_THREADS = 1024;

template <typename T, int WIDTH>
__global__ void __launch_bounds__(SQUARE_SUM_THREADS) square_sum_parts(const T* flat, double* parts, int64_t count) {
  using P = Pack<T, WIDTH>;
  constexpr int STRIDE = SQUARE_SUM_THREADS * WIDTH;
  const int64_t begin = int64_t(blockIdx.x) * SQUARE_SUM_TILE;
  const int64_t end = begin + SQUARE_SUM_TILE < count ? begin + SQUARE_SUM_TILE : count;
  double sum[1] = {0};
  for (int64_t first = begin + threadIdx.x * WIDTH; first < end; first += STRIDE * SQUARE_SUM_PACKS) {
    P x[SQUARE_SUM_PACKS] = {};
#pragma unroll
    for (int i = 0; i < SQUARE_SUM_PACKS; ++i) {
      if (first + i * STRIDE < end) x[i] = P::load(flat + first + i * STRIDE);
    }
#pragma unroll
    for (int i = 0; i < SQUARE_SUM_PACKS; ++i) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) sum[0] += double(widen(x[i].lane[k])) * double(widen(x[i].lane[k]));
    }
  }
  sum_over_row(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum[0];
}

// One block suffices: it reads 8192 times fewer numbers than were summed.
__global__ void __launch_bounds__(ADD_PARTS_THREADS) add_parts(const double* parts, double* total, int64_t num_parts) {
  double sum[1] = {0};
#pragma unroll 8
  for (int64_t part = threadIdx.x; part < num_parts; part += ADD_PARTS_THREADS) sum[0] += parts[part];
  sum_over_row(sum);
  if (threadIdx.x == 0) *total = sum[0];
}

template <typename T>
cudaError_t launch_square_sum_parts(cudaStream_t stream, const T* flat, double* parts, int64_t count) {
  return dispatch_width<T>(pack_width<T>(count, {flat}), [&](auto width) {
    const int64_t tiles = divide_up(count, SQUARE_SUM_TILE);
    return launch(stream, square_sum_parts<T, width.value>, tiles, dim3(SQUARE_SUM_THREADS), flat, parts, count);
  });
}

cudaError_t launch_add_parts(cudaStream_t stream, const double* parts, double* total, int64_t num_parts) {
  return launch(stream, add_parts, 1, dim3(ADD_PARTS_THREADS), parts, total, num_parts);
}

#define INSTANTIATE(T) template cudaError_t launch_square_sum_parts(cudaStream_t, const T*, double*, int64_t);
MEGATRAIN_FOR_FLOATING(INSTANTIATE)

}  // namespace megatrain
