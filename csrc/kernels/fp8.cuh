// Conversion of single numbers to 8-bit floating point, scales, and the largest magnitude over a block.
#pragma once

#include <cuda_fp8.h>

#include "row_sum.cuh"

namespace megatrain {

template <__nv_fp8_interpretation_t FORMAT>
constexpr float fp8_largest = FORMAT == __NV_E4M3 ? 448.0f : 57344.0f;

template <__nv_fp8_interpretation_t FORMAT>
__device__ __forceinline__ unsigned quantize_pair(float a, float b) {
  const float nan = __uint_as_float(0x7fffffffu);
  // a - a is zero only for finite numbers
  const float2 pair{a - a == 0.0f ? a : nan, b - b == 0.0f ? b : nan};
  return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, FORMAT);
}

constexpr float LARGEST_SCALE = 0x1p126f;  // the largest power of 2 whose inverse is a normal number

// The scale that maps the largest magnitude to the largest number of the format, at most LARGEST_SCALE. 1 if all are
// zero. NaN and infinity remain visible.
template <__nv_fp8_interpretation_t FORMAT>
__device__ __forceinline__ float scale_for(float largest) {
  if (largest == 0.0f) return 1.0f;
  const float scale = fp8_largest<FORMAT> / largest;
  return scale > LARGEST_SCALE ? LARGEST_SCALE : scale;
}

// The maximum that keeps NaN, which fmaxf does not.
__device__ __forceinline__ float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

__device__ __forceinline__ float warp_largest(float value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    value = larger_or_nan(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  return value;
}

// The largest value over the block of blockDim.x threads, a multiple of 32. Every thread must call it, only once in a kernel.
__device__ __forceinline__ float block_largest(float value) {
  __shared__ float of_warp[WARP];
  value = warp_largest(value);
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = value;
  __syncthreads();
  for (int warp = 0; warp < int(blockDim.x) / WARP; ++warp) value = larger_or_nan(value, of_warp[warp]);
  return value;
}

}  // namespace megatrain
