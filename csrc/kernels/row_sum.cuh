// Sums over the threads that hold a row: blockDim.x threads, a multiple of 32; threadIdx.y is the row.
#pragma once

namespace megatrain {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

template <typename A>
__device__ __forceinline__ A warp_sum(A value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

// Replaces each of COUNT values by its sum over the row. Every thread of the block must call it.
template <int COUNT, typename A>
__device__ __forceinline__ void sum_over_row(A (&values)[COUNT]) {
  __shared__ A of_warp[COUNT][WARP];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = warp_sum(values[i]);
  const int warps_a_row = blockDim.x / WARP;
  if (warps_a_row == 1) return;

  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // another thread may still read the sums of the last call
  if (thread % WARP == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) of_warp[i][thread / WARP] = values[i];
  }
  __syncthreads();
  const int first = threadIdx.y * warps_a_row;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    A sum = of_warp[i][first];
    for (int warp = 1; warp < warps_a_row; ++warp) sum += of_warp[i][first + warp];
    values[i] = sum;
  }
}

}  // namespace megatrain
