// Rows of a table by index, and the sum of gradients into those rows. An index of -1 has no row.
#pragma once

#include <cassert>
#include <cstdint>

#include "pack.cuh"
#include "row_sum.cuh"

namespace megatrain {

constexpr int LOOKUP_THREADS = 256;
constexpr int LOOKUP_UNITS = 4;  // 64 bytes for each thread in flight

// out[row] = table[tokens[row]], or zeros. Each row is `units` of type Unit, moved by blockDim.x threads.
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

// How gradients are summed: tokens are sorted, so equal ones form a run. A block sums the runs of PART_ROWS places, for
// some columns. A run within one part is added to the table at once. For a run over several parts, the sum of each part
// goes to `parts`, and sum_parts adds these in order afterwards. So a frequent token makes no block slower than the
// others, and each element of the table has one writer.
constexpr int PART_ROWS = 32;
constexpr int PART_THREADS = 128;
constexpr int PART_ROWS_AT_ONCE = 8;  // 128 bytes for each thread in flight

template <typename T, typename W>
struct RowSums {
  const int32_t* sorted;  // tokens in ascending order
  const int64_t* order;   // the row of grad of each sorted token
  const T* grad;          // [num_tokens, columns]
  W* table;               // [num_rows, columns], added to
  wide_t<T>* parts;       // [number of parts, 2, columns]: sums of the runs from the previous and into the next part
  int64_t num_tokens, num_rows;
  int columns;
  int tiles;  // blocks side by side over the columns
};

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
  __shared__ int32_t keys[PART_ROWS + 2];  // with the neighbours on both sides
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

}  // namespace megatrain
