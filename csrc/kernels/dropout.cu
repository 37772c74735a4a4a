// The kernels of dropout.h, and their launches.
#include "dropout.h"

#include "columns.cuh"
#include "launch.cuh"
#include "pack.cuh"

namespace megatrain {

// SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA'14; constants of Stafford's mix 13).
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

__device__ __forceinline__ uint64_t mix(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

__device__ __forceinline__ uint64_t hash(const DropoutKey& key, uint64_t index) {
  return mix(mix((index + 1) * GOLDEN + key.first) ^ key.second);
}

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
        hash_of_row[thread] = hash(p.key, uint64_t(p.token[start + thread]));
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

template <typename T>
cudaError_t launch_dropout(cudaStream_t stream, const Dropout<T>& p, const WalkShape& shape) {
  return dispatch_width<T>(shape.width, [&](auto width) {
    return launch(stream, dropout<T, width.value>, shape.blocks, shape.block, p);
  });
}

#define INSTANTIATE(T) template cudaError_t launch_dropout(cudaStream_t, const Dropout<T>&, const WalkShape&);
MEGATRAIN_FOR_FLOATING(INSTANTIATE)

}  // namespace megatrain
