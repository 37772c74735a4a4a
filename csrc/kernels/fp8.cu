// The kernels of fp8.h, and their launches.
#include "fp8.h"

#include <algorithm>

#include "fp8.cuh"
#include "launch.cuh"
#include "pack.cuh"

namespace megatrain {

constexpr int FP8_THREADS = 256;
constexpr int LARGEST_PACKS = 4;  // packs of a thread in flight

template <typename T, int WIDTH>
__global__ void __launch_bounds__(FP8_THREADS) largest_parts(const T* x, float* parts, int64_t numel) {
  using P = Pack<T, WIDTH>;
  float largest = 0.0f;
  const int64_t step = int64_t(gridDim.x) * blockDim.x * WIDTH;
  for (int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * WIDTH; i < numel; i += LARGEST_PACKS * step) {
    P packs[LARGEST_PACKS] = {};
#pragma unroll
    for (int u = 0; u < LARGEST_PACKS; ++u) {
      if (i + u * step < numel) packs[u] = P::load(x + i + u * step);
    }
#pragma unroll
    for (int u = 0; u < LARGEST_PACKS; ++u) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) largest = larger_or_nan(largest, fabsf(float(widen(packs[u].lane[k]))));
    }
  }
  largest = block_largest(largest);
  if (threadIdx.x == 0) parts[blockIdx.x] = largest;
}

// One block.
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

constexpr int TILE_WORDS = FP8_TILE / 4;  // four rows of a column form one word
constexpr int TILE_STRIDE = TILE_WORDS + 1;

// A block handles a tile of 128 x 128. A thread holds 4 rows of 8 columns at a time: a row gives 8 bytes of q, and a column
// gives one word of the tile in shared memory, from which q_t is written along its rows. IS_WIDE: rows and columns are
// multiples of 16 at aligned addresses; otherwise single elements are read and written.
template <typename T, __nv_fp8_interpretation_t FORMAT, bool IS_WIDE>
__global__ void __launch_bounds__(FP8_THREADS) quantize(const Quantize<T> p) {
  constexpr int WIDTH = 8;
  constexpr int LANES = full_width<T> < WIDTH ? full_width<T> : WIDTH;  // of a load: 16 bytes at most
  using P = Pack<T, LANES>;
  __shared__ unsigned tile[FP8_TILE][TILE_STRIDE];
  const int64_t row0 = int64_t(blockIdx.y) * FP8_TILE, column0 = int64_t(blockIdx.x) * FP8_TILE;
  float largest = 0.0f;

#pragma unroll
  for (int pass = 0; pass < FP8_TILE * FP8_TILE / (4 * WIDTH * FP8_THREADS); ++pass) {
    const int piece = pass * FP8_THREADS + threadIdx.x;
    const int column = piece % (FP8_TILE / WIDTH) * WIDTH;  // within the tile
    const int word = piece / (FP8_TILE / WIDTH);            // the four rows from 4 * word
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
    for (int piece = threadIdx.x; piece < FP8_TILE * FP8_TILE / 16; piece += FP8_THREADS) {
      const int column = piece / (FP8_TILE / 16), word = piece % (FP8_TILE / 16) * 4;
      if (column0 + column >= p.columns || row0 + 4 * word >= p.rows) continue;
      const unsigned* from = &tile[column][word];
      uint4* to = reinterpret_cast<uint4*>(p.q_t + (column0 + column) * p.rows + row0 + 4 * word);
      *to = uint4{from[0], from[1], from[2], from[3]};
    }
  } else {
    for (int piece = threadIdx.x; piece < FP8_TILE * FP8_TILE; piece += FP8_THREADS) {
      const int column = piece / FP8_TILE, row = piece % FP8_TILE;
      if (column0 + column >= p.columns || row0 + row >= p.rows) continue;
      p.q_t[(column0 + column) * p.rows + row0 + row] = tile[column][row / 4] >> 8 * (row % 4);
    }
  }
}

// One block handles one row and reads it twice, the second time from the caches.
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

// One thread for each column.
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

// One thread for each column.
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

namespace {

constexpr int BLOCKS_A_MULTIPROCESSOR = 8;

// Calls body(the format as a constant).
template <typename Body>
cudaError_t dispatch_format(Fp8Format format, Body&& body) {
  if (format == Fp8Format::E4M3) return body(std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>{});
  return body(std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>{});
}

}  // namespace

int64_t num_largest_parts(int num_multiprocessors, int64_t numel, int width) {
  const int64_t wanted = divide_up(numel, int64_t(FP8_THREADS) * width * LARGEST_PACKS);
  return std::clamp<int64_t>(wanted, 1, num_multiprocessors * BLOCKS_A_MULTIPROCESSOR);
}

template <typename T>
cudaError_t launch_largest_parts(cudaStream_t stream, const T* x, float* parts, int64_t numel, int64_t num_parts, int width) {
  return dispatch_width<T>(width, [&](auto width) {
    return launch(stream, largest_parts<T, width.value>, num_parts, dim3(FP8_THREADS), x, parts, numel);
  });
}

cudaError_t launch_scale_of_parts(cudaStream_t stream, Fp8Format format, const float* parts, int64_t num_parts, float* scale) {
  return dispatch_format(format, [&](auto format) {
    return launch(stream, scale_of_parts<format.value>, 1, dim3(FP8_THREADS), parts, num_parts, scale);
  });
}

template <typename T>
cudaError_t launch_quantize(cudaStream_t stream, Fp8Format format, const Quantize<T>& p) {
  const dim3 grid(unsigned(divide_up(p.columns, FP8_TILE)), unsigned(divide_up(p.rows, FP8_TILE)));
  const bool is_wide = p.rows % 16 == 0 && p.columns % 16 == 0 && is_aligned(p.x) && is_aligned(p.q) && is_aligned(p.q_t);
  return dispatch_format(format, [&](auto format) {
    const auto kernel = is_wide ? quantize<T, format.value, true> : quantize<T, format.value, false>;
    return launch_grid(stream, kernel, grid, dim3(FP8_THREADS), p);
  });
}

template <typename T>
cudaError_t launch_quantize_rows(cudaStream_t stream, Fp8Format format, const T* x, unsigned char* q, float* inverse, int64_t rows,
                                 int64_t columns) {
  const bool is_wide = columns % 16 == 0 && is_aligned(x) && is_aligned(q);
  return dispatch_format(format, [&](auto format) {
    const auto kernel = is_wide ? quantize_rows<T, format.value, full_width<T>> : quantize_rows<T, format.value, 1>;
    return launch(stream, kernel, rows, dim3(FP8_THREADS), x, q, inverse, columns);
  });
}

template <typename T>
cudaError_t launch_largest_of_columns(cudaStream_t stream, const T* x, float* parts, int64_t rows, int64_t columns) {
  const dim3 grid(unsigned(divide_up(columns, FP8_THREADS)), unsigned(divide_up(rows, COLUMN_ROWS)));
  return launch_grid(stream, largest_of_columns<T>, grid, dim3(FP8_THREADS), x, parts, rows, columns);
}

cudaError_t launch_scale_of_columns(cudaStream_t stream, Fp8Format format, const float* parts, int64_t num_parts, int64_t columns,
                                    float* scale, float* inverse) {
  return dispatch_format(format, [&](auto format) {
    return launch(stream, scale_of_columns<format.value>, divide_up(columns, FP8_THREADS), dim3(FP8_THREADS), parts, num_parts,
                  columns, scale, inverse);
  });
}

#define INSTANTIATE(T)                                                                                                   \
  template cudaError_t launch_largest_parts(cudaStream_t, const T*, float*, int64_t, int64_t, int);                     \
  template cudaError_t launch_quantize(cudaStream_t, Fp8Format, const Quantize<T>&);                                    \
  template cudaError_t launch_quantize_rows(cudaStream_t, Fp8Format, const T*, unsigned char*, float*, int64_t, int64_t); \
  template cudaError_t launch_largest_of_columns(cudaStream_t, const T*, float*, int64_t, int64_t);
INSTANTIATE(__nv_bfloat16)
INSTANTIATE(__half)
INSTANTIATE(float)

}  // namespace megatrain
