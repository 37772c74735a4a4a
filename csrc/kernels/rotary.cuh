// Rotary positions: heads are read, rotated (queries and keys) or not (values), and written to their target, which may be
// the same place. Half-split convention: unit d is paired with unit d + half.
#pragma once

#include "pack.cuh"

namespace megatrain {

constexpr int ROTARY_HEADS = 4;      // heads of a thread at a time: 128 bytes in flight
constexpr int ROTARY_THREADS = 128;  // threads of a block
constexpr int ROTARY_MIN_BLOCKS = 4;

// Heads [S, B, G, heads of a group, D], with contiguous units. Strides in elements.
template <typename T>
struct HeadsFrom {
  const T* place;
  int64_t sequence, batch, group, head;
};
template <typename T>
struct HeadsTo {
  T* place;
  int64_t sequence, batch, group, head;
};

template <typename T>
struct Rotary {
  HeadsFrom<T> from[3];  // queries, keys, values
  HeadsTo<T> to[3];
  const wide_t<T>* cos;  // [S, half]
  const wide_t<T>* sin;
  int tokens, batch;
  int heads;    // of a token
  int a_group;  // heads of a group: queries, then a key, then a value where values are moved too
  int queries;  // in a group
  int half;
  bool is_inverse;
};

// Loads WIDTH fp32 or fp64 numbers, in accesses of at most 16 bytes.
template <int WIDTH, typename A>
__device__ __forceinline__ void load_row(const A* place, A (&row)[WIDTH]) {
  constexpr int width = WIDTH < full_width<A> ? WIDTH : full_width<A>;
#pragma unroll
  for (int k = 0; k < WIDTH; k += width) {
    const Pack<A, width> pack = Pack<A, width>::load(place + k);
#pragma unroll
    for (int i = 0; i < width; ++i) row[k + i] = pack.lane[i];
  }
}

// threadIdx.z: the token within the block; y: its first head; x: the pack of the first half, and the pack paired with it.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(ROTARY_THREADS, ROTARY_MIN_BLOCKS) rotary(const Rotary<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  const int64_t token = int64_t(blockIdx.x) * blockDim.z + threadIdx.z;
  if (token >= p.tokens) return;
  const int position = int(token) / p.batch, sample = int(token) - position * p.batch;

  for (int unit = threadIdx.x * WIDTH; unit < p.half; unit += blockDim.x * WIDTH) {
    A cos[WIDTH], sin[WIDTH];
    load_row(p.cos + int64_t(position) * p.half + unit, cos);
    load_row(p.sin + int64_t(position) * p.half + unit, sin);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) sin[k] = p.is_inverse ? -sin[k] : sin[k];

    for (int start = threadIdx.y; start < p.heads; start += blockDim.y * ROTARY_HEADS) {
      P first[ROTARY_HEADS], second[ROTARY_HEADS];
      T* target[ROTARY_HEADS];
      bool is_turned[ROTARY_HEADS];
#pragma unroll
      for (int i = 0; i < ROTARY_HEADS; ++i) {
        const int number = start + i * blockDim.y;
        if (number >= p.heads) continue;
        const int group = number / p.a_group, in_group = number - group * p.a_group;
        const int kind = in_group < p.queries ? 0 : in_group - p.queries + 1;
        const int head = kind == 0 ? in_group : 0;
        const HeadsFrom<T> from = kind == 0 ? p.from[0] : kind == 1 ? p.from[1] : p.from[2];
        const HeadsTo<T> to = kind == 0 ? p.to[0] : kind == 1 ? p.to[1] : p.to[2];
        const T* source = from.place + position * from.sequence + sample * from.batch + group * from.group + head * from.head + unit;
        target[i] = to.place + position * to.sequence + sample * to.batch + group * to.group + head * to.head + unit;
        is_turned[i] = kind != 2;
        first[i] = P::load(source);
        second[i] = P::load(source + p.half);
      }
#pragma unroll
      for (int i = 0; i < ROTARY_HEADS; ++i) {
        if (start + i * int(blockDim.y) >= p.heads) continue;
        if (is_turned[i]) {
#pragma unroll
          for (int k = 0; k < WIDTH; ++k) {
            const A a = widen(first[i].lane[k]), b = widen(second[i].lane[k]);
            first[i].lane[k] = narrow<T>(a * cos[k] - b * sin[k]);
            second[i].lane[k] = narrow<T>(b * cos[k] + a * sin[k]);
          }
        }
        first[i].store(target[i]);
        second[i].store(target[i] + p.half);
      }
    }
  }
}

}  // namespace megatrain
