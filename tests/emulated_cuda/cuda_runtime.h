// Stands in for NVIDIA's header where the kernels of csrc/ are compiled for the processor: what they use of CUDA, carried
// out one block after another. A thread of a block is a fiber; it runs until a barrier or a shuffle makes it wait.
//
// Strict where hardware is lenient: a barrier or a shuffle that not every thread of the block or warp reaches ends the
// process with a message. The order in which threads run is chosen by the tests (emulator.cpp), so a missing barrier
// shows as a result that depends on it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulated {
void run_grid(dim3 grid, dim3 block, const std::function<void()>& thread);
void block_barrier();
void warp_barrier(unsigned mask);
// Gives `value` of this lane to its warp and returns that of `lane`; all 32 lanes must take part.
std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned lane);
unsigned lane();
}  // namespace emulated

inline void __syncthreads() { emulated::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::warp_barrier(mask); }

template <typename T>
T shuffle_from(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulated::exchange(mask, bits, lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int = 32) {
  return shuffle_from(mask, value, emulated::lane() ^ unsigned(lane_mask));
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int = 32) {
  unsigned lane = emulated::lane() + delta;
  return shuffle_from(mask, value, lane < 32 ? lane : emulated::lane());
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int = 32) {
  return shuffle_from(mask, value, emulated::lane() >= delta ? emulated::lane() - delta : emulated::lane());
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int = 32) {
  return shuffle_from(mask, value, unsigned(lane) & 31u);
}

template <typename T> T __ldg(const T* place) { return *place; }
template <typename T> T __ldcs(const T* place) { return *place; }
template <typename T> void __stcs(T* place, T value) { *place = value; }

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  void* attrs = nullptr;
  unsigned numAttrs = 0;
};
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
  emulated::run_grid(config->gridDim, config->blockDim, [&] { std::apply(kernel, values); });
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* index) { *index = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
// Few, so that small inputs already make a block go round its loop more than once.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { *value = 3; return cudaSuccess; }
