// Dropout with counter-based random numbers (bitwise those of megatrain/rng.py), with bias before and residual after it.
#pragma once

#include "columns.cuh"

namespace megatrain {

// SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA'14; constants of Stafford's mix 13).
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

__device__ __forceinline__ uint64_t mix(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

struct DropoutKey {
  uint64_t first, second;

  __device__ __forceinline__ uint64_t hash(uint64_t index) const { return mix(mix((index + 1) * GOLDEN + first) ^ second); }
};

// out = residual + kept * (y + bias) * scale. All terms except y may be missing.
template <typename T>
struct Dropout {
  const T* y;
  const T* residual;
  const T* bias;         // [columns]
  const int64_t* token;  // one number for each row, from which its mask is drawn; null: all is kept
  T* out;
  wide_t<T>* parts;  // [groups of threads, columns]: sums over rows of the result before it is rounded
  ColumnWalk walk;
  DropoutKey key;
  uint64_t threshold;  // an element is dropped when the upper half of its 64 bits is below it
  wide_t<T> scale;
};

template <typename T, int WIDTH>
__global__ void __launch_bounds__(WALK_THREADS, WALK_MIN_BLOCKS) dropout(const Dropout<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  __shared__ uint64_t hash_of_row[WALK_THREADS / 32 * WALK_ROWS];
  const Stand<WIDTH> stand(p.walk);
  const int64_t column = stand.column, columns = p.walk.columns;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const bool is_active = column < columns;
  const uint64_t unit = uint64_t(column + 1) * GOLDEN;
  A bias[WIDTH], sum[WIDTH] = {};
  P of_bias{};
  if (is_active && p.bias != nullptr) of_bias = P::load(p.bias + column);
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) bias[k] = widen(of_bias.lane[k]);

  // all groups of a block run the same number of rounds, because they meet at barriers
  const int64_t rows_a_round = stand.num_groups * WALK_ROWS;
  for (int64_t start = (stand.group - threadIdx.y) * WALK_ROWS; start < p.walk.rows; start += rows_a_round) {
    const int64_t first = start + threadIdx.y * WALK_ROWS;
    P y[WALK_ROWS], residual[WALK_ROWS];
#pragma unroll
    for (int r = 0; r < WALK_ROWS; ++r) {
      residual[r] = P{};
      if (!is_active || first + r >= p.walk.rows) continue;
      y[r] = P::load(p.y + (first + r) * columns + column);
      if (p.residual != nullptr) residual[r] = P::load(p.residual + (first + r) * columns + column);
    }
    if (p.token != nullptr) {  // while the rows are being loaded: one hash for each row, for all of its units
      __syncthreads();         // hashes of the last round may still be in use
      if (thread < int(blockDim.y) * WALK_ROWS && start + thread < p.walk.rows) {
        hash_of_row[thread] = p.key.hash(uint64_t(p.token[start + thread]));
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < WALK_ROWS; ++r) {
      if (!is_active || first + r >= p.walk.rows) continue;
      const uint64_t row = hash_of_row[threadIdx.y * WALK_ROWS + r];
      P out;
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) {
        A value = widen(y[r].lane[k]) + bias[k];
        if (p.token != nullptr) {
          const bool is_kept = mix(row + unit + k * GOLDEN) >> 32 >= p.threshold;
          value = is_kept ? value * p.scale : A(0);
        }
        value += widen(residual[r].lane[k]);
        sum[k] += value;
        out.lane[k] = narrow<T>(value);
      }
      if (p.out != nullptr) out.store(p.out + (first + r) * columns + column);
    }
  }
  if (!is_active || p.parts == nullptr) return;
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) p.parts[stand.group * columns + column + k] = sum[k];
}

}  // namespace megatrain
