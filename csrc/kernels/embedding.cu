// The kernels of embedding.h, and their launches.
#include "embedding.h"

#include <algorithm>
#include <cassert>

#include "launch.cuh"
#include "pack.cuh"
#include "row_sum.cuh"

namespace megatrain {

constexpr int LOOKUP_THREADS = 256;
constexpr int LOOKUP_UNITS = 4;  // 64 bytes for each thread in flight

// Each row is `units` of type Unit, moved by blockDim.x threads.
template <typename Unit>
__global__ void __launch_bounds__(LOOKUP_THREADS)
    look_up_rows(const int64_t* tokens, const Unit* table, Unit* out, int64_t num_tokens, int64_t num_rows, int units) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= num_tokens) return;
  const int64_t token = tokens[row];
  assert(token >= -1 && token < num_rows);
  const Unit* from = table + token * units;
  Unit* to = out + row * units;
  for (int first = threadIdx.x; first < units; first += LOOKUP_UNITS * blockDim.x) {
    Unit unit[LOOKUP_UNITS] = {};
#pragma unroll
    for (int i = 0; i < LOOKUP_UNITS; ++i) {
      const int place = first + i * blockDim.x;
      if (token >= 0 && place < units) unit[i] = from[place];
    }
#pragma unroll
    for (int i = 0; i < LOOKUP_UNITS; ++i) {
      const int place = first + i * blockDim.x;
      if (place < units) to[place] = unit[i];
    }
  }
}

constexpr int PART_THREADS = 128;
constexpr int PART_ROWS_AT_ONCE = 8;  // 128 bytes for each thread in flight

// Adds sum[i] to place[i], rounded once, for WIDTH elements in packs of at most 16 bytes.
template <typename W, int WIDTH>
__device__ __forceinline__ void add_to(W* place, const wide_t<W> (&sum)[WIDTH]) {
  constexpr int LANES = WIDTH < full_width<W> ? WIDTH : full_width<W>;
  using P = Pack<W, LANES>;
#pragma unroll
  for (int first = 0; first < WIDTH; first += LANES) {
    P pack = P::load(place + first);
#pragma unroll
    for (int k = 0; k < LANES; ++k) pack.lane[k] = narrow<W>(widen(pack.lane[k]) + sum[first + k]);
    pack.store(place + first);
  }
}

template <typename T, typename W, int WIDTH>
__global__ void __launch_bounds__(PART_THREADS) sum_rows(const RowSums<T, W> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  __shared__ int32_t keys[PART_ROWS + 2];  // with the neighbors on both sides
  __shared__ int64_t places[PART_ROWS];
  const int64_t part = blockIdx.x / p.tiles;
  const int column = (int(blockIdx.x % p.tiles) * PART_THREADS + threadIdx.x) * WIDTH;
  const int64_t begin = part * PART_ROWS;
  const int count = int(p.num_tokens - begin < PART_ROWS ? p.num_tokens - begin : PART_ROWS);
  const int thread = threadIdx.x;
  if (thread < count + 2) {
    const int64_t at = begin - 1 + thread;
    keys[thread] = at >= 0 && at < p.num_tokens ? p.sorted[at] : -1;
    assert(keys[thread] >= -1 && keys[thread] < p.num_rows);
  }
  if (thread < count) places[thread] = p.order[begin + thread];
  __syncthreads();
  if (column >= p.columns) return;

  A sum[WIDTH] = {};
  bool began_before = keys[1] >= 0 && keys[0] == keys[1];
  for (int first = 0; first < count; first += PART_ROWS_AT_ONCE) {
    P rows[PART_ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < PART_ROWS_AT_ONCE; ++i) {
      if (first + i < count && keys[first + i + 1] >= 0) rows[i] = P::load(p.grad + places[first + i] * p.columns + column);
    }
#pragma unroll
    for (int i = 0; i < PART_ROWS_AT_ONCE; ++i) {
      if (first + i >= count) break;
      const int32_t key = keys[first + i + 1];
      if (key < 0) continue;
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) sum[k] += widen(rows[i].lane[k]);
      const bool goes_on = keys[first + i + 2] == key;
      const bool is_last = first + i + 1 == count;
      if (goes_on && !is_last) continue;
      if (goes_on || began_before) {
        A* waiting = p.parts + (part * 2 + !began_before) * p.columns + column;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) waiting[k] = sum[k];
      } else {
        add_to<W, WIDTH>(p.table + int64_t(key) * p.columns + column, sum);
      }
      began_before = false;
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) sum[k] = 0;
    }
  }
}

// Adds the sums of runs over several parts, in the order of the parts. Each block handles the run that begins in its part.
template <typename T, typename W>
__global__ void __launch_bounds__(PART_THREADS) sum_parts(const RowSums<T, W> p) {
  const int64_t part = blockIdx.x / p.tiles;
  const int column = int(blockIdx.x % p.tiles) * PART_THREADS + threadIdx.x;
  const int64_t end = (part + 1) * PART_ROWS;
  if (column >= p.columns || end >= p.num_tokens) return;
  const int32_t key = p.sorted[end - 1];
  const int64_t begin = part * PART_ROWS;
  const bool began_before = begin > 0 && p.sorted[begin - 1] == key;
  if (key < 0 || p.sorted[end] != key || began_before) return;

  wide_t<T> sum[1] = {p.parts[(part * 2 + 1) * p.columns + column]};
  for (int64_t next = end; next < p.num_tokens && p.sorted[next] == key; next += PART_ROWS) {
    sum[0] += p.parts[next / PART_ROWS * 2 * p.columns + column];
  }
  add_to<W, 1>(p.table + int64_t(key) * p.columns + column, sum);
}

namespace {

// units: of a row.
template <typename Unit>
cudaError_t launch_units(cudaStream_t stream, const LookUp& p, int units) {
  const int threads = std::clamp<int>(int(divide_up(divide_up(units, LOOKUP_UNITS), WARP)) * WARP, WARP, LOOKUP_THREADS);
  const int rows_a_block = LOOKUP_THREADS / threads;
  return launch(stream, look_up_rows<Unit>, divide_up(p.num_tokens, rows_a_block), dim3(threads, rows_a_block), p.tokens,
                static_cast<const Unit*>(p.table), static_cast<Unit*>(p.out), p.num_tokens, p.num_rows, units);
}

}  // namespace

cudaError_t launch_look_up(cudaStream_t stream, const LookUp& p) {
  const int64_t row_bytes = int64_t(p.columns) * p.element_bytes;
  if (row_bytes % PACK_BYTES == 0 && is_aligned(p.table) && is_aligned(p.out)) {
    return launch_units<uint4>(stream, p, int(row_bytes / PACK_BYTES));
  }
  switch (p.element_bytes) {
    case 2: return launch_units<uint16_t>(stream, p, p.columns);
    case 4: return launch_units<uint32_t>(stream, p, p.columns);
    case 8: return launch_units<uint64_t>(stream, p, p.columns);
    default: return cudaErrorInvalidValue;
  }
}

template <typename T, typename W>
cudaError_t launch_sum_rows(cudaStream_t stream, RowSums<T, W> p) {
  return dispatch_width<T>(pack_width<T>(p.columns, {p.grad, p.table}), [&](auto width) {
    p.tiles = int(divide_up(p.columns, PART_THREADS * width.value));
    return launch(stream, sum_rows<T, W, width.value>, divide_up(p.num_tokens, PART_ROWS) * p.tiles, dim3(PART_THREADS), p);
  });
}

template <typename T, typename W>
cudaError_t launch_sum_parts(cudaStream_t stream, RowSums<T, W> p) {
  p.tiles = int(divide_up(p.columns, PART_THREADS));
  return launch(stream, sum_parts<T, W>, (divide_up(p.num_tokens, PART_ROWS) - 1) * p.tiles, dim3(PART_THREADS), p);
}

#define INSTANTIATE_FOR_TABLE(T, W)                                       \
  template cudaError_t launch_sum_rows(cudaStream_t, RowSums<T, W>);      \
  template cudaError_t launch_sum_parts(cudaStream_t, RowSums<T, W>);
#define INSTANTIATE(T) INSTANTIATE_FOR_TABLE(T, T)
MEGATRAIN_FOR_FLOATING(INSTANTIATE)
INSTANTIATE_FOR_TABLE(__nv_bfloat16, float)
INSTANTIATE_FOR_TABLE(__half, float)

}  // namespace megatrain
