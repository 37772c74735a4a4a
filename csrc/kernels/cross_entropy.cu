// One block handles one row: 256 threads with four packs of 16 bytes each keep 16 KB of a row in flight. Four such blocks
// on a multiprocessor hide the latency of memory, even while one of them waits at a barrier.
#include "cross_entropy.h"

#include <cmath>

#include "launch.cuh"
#include "pack.cuh"
#include "row_sum.cuh"

namespace megatrain {

constexpr int LOSS_THREADS = 256;
constexpr int LOSS_PACKS = 4;
constexpr int LOSS_BLOCKS = 4;  // blocks of a multiprocessor: leaves each thread 64 registers
constexpr int64_t IGNORED_LABEL = -100;

// __expf, except that results below 2^-126 are 0. Keeping them would take three more instructions, of the about thirteen
// that an H200 can issue while it loads one bf16.
__device__ __forceinline__ float fast_exponential(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
  return power;
#else
  return __expf(x);
#endif
}
__device__ __forceinline__ double fast_exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// The base of exponents: the maximum, or 0 while there is no number yet. NaN propagates into the sum.
template <typename A>
__device__ __forceinline__ A base_of(A largest) {
  return largest == -A(INFINITY) ? A(0) : largest;
}

// The maximum over the block. Every thread must call it, and only once in a kernel.
template <typename A>
__device__ __forceinline__ A max_over_block(A value) {
  __shared__ A of_warp[LOSS_THREADS / WARP];
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    value = larger(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = value;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < LOSS_THREADS / WARP; ++warp) value = larger(value, of_warp[warp]);
  return value;
}

template <typename T, int WIDTH, bool HAS_SUM>
__global__ void __launch_bounds__(LOSS_THREADS, LOSS_BLOCKS) loss_statistics(const LossStatistics<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  const T* logits = p.logits + int64_t(blockIdx.x) * p.columns;
  A target = 0;
  if (threadIdx.x == 0) {
    const int64_t column = p.labels[blockIdx.x] - p.first_column;
    if (column >= 0 && column < p.real) target = widen(logits[column]);
  }
  A largest = -A(INFINITY);
  A sums[HAS_SUM ? 2 : 1] = {};

  const int64_t num_packs = p.real / WIDTH;
  for (int64_t first = threadIdx.x; first < num_packs; first += LOSS_PACKS * LOSS_THREADS) {
    P x[LOSS_PACKS];
#pragma unroll
    for (int i = 0; i < LOSS_PACKS; ++i) {
      const int64_t pack = first + i * LOSS_THREADS;
      if (pack < num_packs) {
        x[i] = P::load(logits + pack * WIDTH);
      } else {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) x[i].lane[k] = narrow<T>(-A(INFINITY));
      }
    }
    A next = largest;
#pragma unroll
    for (int i = 0; i < LOSS_PACKS; ++i) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) next = larger(next, widen(x[i].lane[k]));
    }
    const A base = base_of(next);
    sums[0] *= fast_exponential(largest - base);
    largest = next;
#pragma unroll
    for (int i = 0; i < LOSS_PACKS; ++i) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) sums[0] += fast_exponential(widen(x[i].lane[k]) - base);
      if constexpr (HAS_SUM) {
        if (first + i * LOSS_THREADS < num_packs) {
#pragma unroll
          for (int k = 0; k < WIDTH; ++k) sums[1] += widen(x[i].lane[k]);
        }
      }
    }
  }
  const int64_t column = num_packs * WIDTH + threadIdx.x;  // less than one pack remains
  if (column < p.real) {
    const A x = widen(logits[column]);
    const A next = larger(largest, x);
    const A base = base_of(next);
    sums[0] = sums[0] * fast_exponential(largest - base) + fast_exponential(x - base);
    if constexpr (HAS_SUM) sums[1] += x;
    largest = next;
  }

  const A of_row = max_over_block(largest);
  sums[0] *= fast_exponential(largest - base_of(of_row));
  sum_over_row(sums);
  if (threadIdx.x != 0) return;
  p.out[blockIdx.x] = of_row + logarithm(sums[0]);
  p.out[p.rows + blockIdx.x] = target;
  if constexpr (HAS_SUM) p.out[2 * p.rows + blockIdx.x] = sums[1];
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(LOSS_THREADS, LOSS_BLOCKS) loss_gradient(const LossGradient<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  T* logits = p.logits + int64_t(blockIdx.x) * p.columns;
  const int64_t label = p.labels[blockIdx.x];
  const bool is_ignored = label == IGNORED_LABEL;
  const A lse = p.lse[blockIdx.x];
  const A grad = p.grad[blockIdx.x];
  const A of_softmax = grad * (1 + p.twice_z_loss * lse);
  const A of_each = grad * p.of_each;
  const A of_target = grad * p.of_target;
  const int64_t target = label - p.first_column;

  const int64_t num_packs = p.real / WIDTH;
  const int64_t target_pack = target >= 0 && target < p.real ? target / WIDTH : -1;
  const int target_lane = int(target % WIDTH);
  for (int64_t first = threadIdx.x; first < num_packs; first += LOSS_PACKS * LOSS_THREADS) {
    P x[LOSS_PACKS];
#pragma unroll
    for (int i = 0; i < LOSS_PACKS; ++i) {
      const int64_t pack = first + i * LOSS_THREADS;
      if (pack < num_packs && !is_ignored) x[i] = P::load(logits + pack * WIDTH);
    }
#pragma unroll
    for (int i = 0; i < LOSS_PACKS; ++i) {
      const int64_t pack = first + i * LOSS_THREADS;
      if (pack >= num_packs) continue;
      A value[WIDTH];
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) value[k] = fast_exponential(widen(x[i].lane[k]) - lse) * of_softmax - of_each;
      if (pack == target_pack) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) value[k] -= k == target_lane ? of_target : A(0);
      }
      // a multiplication by 0 would keep NaN
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) x[i].lane[k] = narrow<T>(is_ignored ? A(0) : value[k]);
      x[i].store(logits + pack * WIDTH);
    }
  }
  for (int64_t column = num_packs * WIDTH + threadIdx.x; column < p.columns; column += LOSS_THREADS) {
    A value = 0;
    if (column < p.real && !is_ignored) {
      value = fast_exponential(widen(logits[column]) - lse) * of_softmax - of_each - (column == target ? of_target : A(0));
    }
    logits[column] = narrow<T>(value);
  }
}

template <typename T>
cudaError_t launch_loss_statistics(cudaStream_t stream, const LossStatistics<T>& p, bool has_sum) {
  return dispatch_width<T>(pack_width<T>(p.columns, {p.logits}), [&](auto width) {
    const auto kernel = has_sum ? loss_statistics<T, width.value, true> : loss_statistics<T, width.value, false>;
    return launch(stream, kernel, p.rows, dim3(LOSS_THREADS), p);
  });
}

template <typename T>
cudaError_t launch_loss_gradient(cudaStream_t stream, const LossGradient<T>& p) {
  return dispatch_width<T>(pack_width<T>(p.columns, {p.logits}), [&](auto width) {
    return launch(stream, loss_gradient<T, width.value>, p.rows, dim3(LOSS_THREADS), p);
  });
}

#define INSTANTIATE(T)                                                                      \
  template cudaError_t launch_loss_statistics(cudaStream_t, const LossStatistics<T>&, bool); \
  template cudaError_t launch_loss_gradient(cudaStream_t, const LossGradient<T>&);
MEGATRAIN_FOR_FLOATING(INSTANTIATE)

}  // namespace megatrain
