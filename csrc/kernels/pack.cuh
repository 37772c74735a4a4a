// How a thread holds elements: conversions to the type in which it computes, arithmetic, and packs.
#pragma once

#include "elements.h"

namespace megatrain {

__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

// Rounds to nearest even, once.
template <typename T>
__device__ __forceinline__ T narrow(wide_t<T> x);
template <>
__device__ __forceinline__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ __half narrow(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ float narrow(float x) { return x; }
template <>
__device__ __forceinline__ double narrow(double x) { return x; }

// The product, rounded: the compiler may not fuse it with a following sum.
__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double product(double x, double y) { return __dmul_rn(x, y); }
// x * y + z, rounded once.
__device__ __forceinline__ float fused_multiply_add(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double fused_multiply_add(double x, double y, double z) { return fma(x, y, z); }
__device__ __forceinline__ float square_root(float x) { return sqrtf(x); }
__device__ __forceinline__ double square_root(double x) { return sqrt(x); }

__device__ __forceinline__ float reciprocal_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return rsqrt(x); }

// WIDTH elements that one thread moves at once.
template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack {
  T lane[WIDTH];

  __device__ __forceinline__ static Pack load(const T* place) { return *reinterpret_cast<const Pack*>(place); }
  __device__ __forceinline__ void store(T* place) const { *reinterpret_cast<Pack*>(place) = *this; }
};

}  // namespace megatrain
