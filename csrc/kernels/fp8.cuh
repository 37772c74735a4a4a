// Quantization to 8-bit floating point, with one scale for the tensor, for each row or for each column, and with the
// transposed copy that matrix products of the backward pass need (they read both operands along the dim of the sum).
//
// Values are multiplied by a scale; products are multiplied by its inverse afterwards. Values that are not finite become
// NaN, because saturation would hide them.
#pragma once

#include <cuda_fp8.h>

#include "pack.cuh"
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

// The scale that maps the largest magnitude to the largest number of the format. 1 if all are zero. NaN and infinity remain
// visible.
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

constexpr int FP8_THREADS = 256;

// parts[block] = the largest magnitude of the block's part of x.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(FP8_THREADS) largest_parts(const T* x, float* parts, int64_t numel) {
  constexpr int UNROLL = 4;
  using P = Pack<T, WIDTH>;
  float largest = 0.0f;
  const int64_t step = int64_t(gridDim.x) * blockDim.x * WIDTH;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * WIDTH; i < numel; i += UNROLL * step) {
    P packs[UNROLL] = {};
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (i + u * step < numel) packs[u] = P::load(x + i + u * step);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) largest = larger_or_nan(largest, fabsf(float(widen(packs[u].lane[k]))));
    }
  }
  largest = block_largest(largest);
  if (threadIdx.x == 0) parts[blockIdx.x] = largest;
}

// scale[0] = the scale for the largest of parts, scale[1] = its inverse. One block.
template <__nv_fp8_interpretation_t FORMAT>
__global__ void __launch_bounds__(FP8_THREADS) scale_of_parts(const float* parts, int64_t num_parts, float* scale) {
  float largest = 0.0f;
  for (int64_t part = threadIdx.x; part < num_parts; part += blockDim.x) largest = larger_or_nan(largest, parts[part]);
  largest = block_largest(largest);
  if (threadIdx.x == 0) {
    scale[0] = scale_for<FORMAT>(largest);
    scale[1] = 1.0f / scale[0];
  }
}

constexpr int TILE = 128;               // rows and columns of a block's tile
constexpr int TILE_WORDS = TILE / 4;    // four rows of a column form one word
constexpr int TILE_STRIDE = TILE_WORDS + 1;

template <typename T>
struct Quantize {
  const T* x;            // [rows, columns]
  const float* scale;    // one number, or one for each column
  unsigned char* q;      // [rows, columns], or null
  unsigned char* q_t;    // [columns, rows], or null
  float* largest;        // [tiles]: the largest magnitude of each tile, or null
  int64_t rows, columns;
  bool is_scale_of_column;
};

// A block handles a tile of 128 x 128. A thread holds 4 rows of 8 columns at a time: a row gives 8 bytes of q, and a column
// gives one word of the tile in shared memory, from which q_t is written along its rows. IS_WIDE: rows and columns are
// multiples of 16 at aligned addresses; otherwise single elements are read and written.
template <typename T, __nv_fp8_interpretation_t FORMAT, bool IS_WIDE>
__global__ void __launch_bounds__(FP8_THREADS) quantize(const Quantize<T> p) {
  constexpr int WIDTH = 8;
  constexpr int LANES = full_width<T> < WIDTH ? full_width<T> : WIDTH;  // of a load: 16 bytes at most
  using P = Pack<T, LANES>;
  __shared__ unsigned tile[TILE][TILE_STRIDE];
  const int64_t row0 = int64_t(blockIdx.y) * TILE, column0 = int64_t(blockIdx.x) * TILE;
  float largest = 0.0f;

#pragma unroll
  for (int pass = 0; pass < TILE * TILE / (4 * WIDTH * FP8_THREADS); ++pass) {
    const int piece = pass * FP8_THREADS + threadIdx.x;
    const int column = piece % (TILE / WIDTH) * WIDTH;  // within the tile
    const int word = piece / (TILE / WIDTH);            // the four rows from 4 * word
    float scale[WIDTH];
    float values[4][WIDTH];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = row0 + 4 * word + r, first = column0 + column;
      if (IS_WIDE && row < p.rows && first < p.columns) {
#pragma unroll
        for (int k = 0; k < WIDTH; k += LANES) {
          const P pack = P::load(p.x + row * p.columns + first + k);
#pragma unroll
          for (int i = 0; i < LANES; ++i) values[r][k + i] = float(widen(pack.lane[i]));
        }
      } else {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          const bool is_inside = !IS_WIDE && row < p.rows && first + k < p.columns;
          values[r][k] = is_inside ? float(widen(p.x[row * p.columns + first + k])) : 0.0f;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      const int64_t at = column0 + column + k;
      scale[k] = p.is_scale_of_column ? (at < p.columns ? p.scale[at] : 0.0f) : p.scale[0];
    }
    unsigned words[WIDTH] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      unsigned quantized[WIDTH / 2];
#pragma unroll
      for (int k = 0; k < WIDTH; k += 2) {
        largest = larger_or_nan(largest, larger_or_nan(fabsf(values[r][k]), fabsf(values[r][k + 1])));
        quantized[k / 2] = quantize_pair<FORMAT>(values[r][k] * scale[k], values[r][k + 1] * scale[k + 1]);
        words[k] |= (quantized[k / 2] & 0xffu) << 8 * r;
        words[k + 1] |= (quantized[k / 2] >> 8) << 8 * r;
      }
      const int64_t row = row0 + 4 * word + r, first = column0 + column;
      if (p.q == nullptr || row >= p.rows) continue;
      if (IS_WIDE) {
        if (first < p.columns) {
          const uint2 eight{quantized[0] | quantized[1] << 16, quantized[2] | quantized[3] << 16};
          *reinterpret_cast<uint2*>(p.q + row * p.columns + first) = eight;
        }
      } else {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          if (first + k < p.columns) p.q[row * p.columns + first + k] = quantized[k / 2] >> 8 * (k % 2);
        }
      }
    }
    if (p.q_t != nullptr) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) tile[column + k][word] = words[k];
    }
  }
  if (p.largest != nullptr) {
    largest = block_largest(largest);
    if (threadIdx.x == 0) p.largest[int64_t(blockIdx.y) * gridDim.x + blockIdx.x] = largest;
  }
  if (p.q_t == nullptr) return;
  __syncthreads();
  if (IS_WIDE) {
    for (int piece = threadIdx.x; piece < TILE * TILE / 16; piece += FP8_THREADS) {
      const int column = piece / (TILE / 16), word = piece % (TILE / 16) * 4;
      if (column0 + column >= p.columns || row0 + 4 * word >= p.rows) continue;
      const unsigned* from = &tile[column][word];
      uint4* to = reinterpret_cast<uint4*>(p.q_t + (column0 + column) * p.rows + row0 + 4 * word);
      *to = uint4{from[0], from[1], from[2], from[3]};
    }
  } else {
    for (int piece = threadIdx.x; piece < TILE * TILE; piece += FP8_THREADS) {
      const int column = piece / TILE, row = piece % TILE;
      if (column0 + column >= p.columns || row0 + row >= p.rows) continue;
      p.q_t[(column0 + column) * p.rows + row0 + row] = tile[column][row / 4] >> 8 * (row % 4);
    }
  }
}

// Quantizes each row with its own scale. One block handles one row and reads it twice, the second time from the caches.
template <typename T, __nv_fp8_interpretation_t FORMAT, int WIDTH>
__global__ void __launch_bounds__(FP8_THREADS) quantize_rows(const T* x, unsigned char* q, float* inverse, int64_t columns) {
  using P = Pack<T, WIDTH>;
  const T* row = x + int64_t(blockIdx.x) * columns;
  float largest = 0.0f;
#pragma unroll 4
  for (int64_t i = int64_t(threadIdx.x) * WIDTH; i < columns; i += FP8_THREADS * WIDTH) {
    const P pack = P::load(row + i);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) largest = larger_or_nan(largest, fabsf(float(widen(pack.lane[k]))));
  }
  const float scale = scale_for<FORMAT>(block_largest(largest));
  if (threadIdx.x == 0) inverse[blockIdx.x] = 1.0f / scale;
  unsigned char* out = q + int64_t(blockIdx.x) * columns;
#pragma unroll 4
  for (int64_t i = int64_t(threadIdx.x) * WIDTH; i < columns; i += FP8_THREADS * WIDTH) {
    const P pack = P::load(row + i);
    if constexpr (WIDTH == 1) {
      out[i] = static_cast<unsigned char>(quantize_pair<FORMAT>(float(widen(pack.lane[0])) * scale, 0.0f));
    } else {
      Pack<unsigned short, WIDTH / 2> pairs;
#pragma unroll
      for (int k = 0; k < WIDTH; k += 2) {
        pairs.lane[k / 2] = static_cast<unsigned short>(
            quantize_pair<FORMAT>(float(widen(pack.lane[k])) * scale, float(widen(pack.lane[k + 1])) * scale));
      }
      pairs.store(reinterpret_cast<unsigned short*>(out + i));
    }
  }
}

constexpr int COLUMN_ROWS = 256;  // rows over which a block finds the largest magnitude of each column

// parts [blocks of rows, columns]: the largest magnitude of each column in COLUMN_ROWS rows. One thread for each column.
template <typename T>
__global__ void __launch_bounds__(FP8_THREADS) largest_of_columns(const T* x, float* parts, int64_t rows, int64_t columns) {
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const int64_t first = int64_t(blockIdx.y) * COLUMN_ROWS;
  const int64_t last = first + COLUMN_ROWS < rows ? first + COLUMN_ROWS : rows;
  float largest = 0.0f;
#pragma unroll 8
  for (int64_t row = first; row < last; ++row) largest = larger_or_nan(largest, fabsf(float(widen(x[row * columns + column]))));
  parts[blockIdx.y * columns + column] = largest;
}

// The scale and its inverse for each column. One thread for each column.
template <__nv_fp8_interpretation_t FORMAT>
__global__ void __launch_bounds__(FP8_THREADS)
    scale_of_columns(const float* parts, int64_t num_parts, int64_t columns, float* scale, float* inverse) {
  const int64_t column = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float largest = 0.0f;
  for (int64_t part = 0; part < num_parts; ++part) largest = larger_or_nan(largest, parts[part * columns + column]);
  scale[column] = scale_for<FORMAT>(largest);
  inverse[column] = 1.0f / scale[column];
}

}  // namespace megatrain
