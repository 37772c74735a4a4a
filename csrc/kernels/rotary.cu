// The kernels of rotary.h, and their launches.
#include "rotary.h"

#include <algorithm>

#include "launch.cuh"
#include "pack.cuh"

namespace megatrain {

constexpr int ROTARY_HEADS = 4;      // heads of a thread at a time: 128 bytes in flight
constexpr int ROTARY_THREADS = 128;  // threads of a block
constexpr int ROTARY_MIN_BLOCKS = 4;

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

namespace {

// Whether packs of `width` are aligned to their size in every head.
template <typename Side>
bool is_packed(const Side& side, int width) {
  return is_aligned(side.place) && side.sequence % width == 0 && side.batch % width == 0 && side.group % width == 0 &&
         side.head % width == 0;
}

template <typename T>
int width_of_heads(const Rotary<T>& p) {
  int width = pack_width<T>(p.half, {p.cos, p.sin});
  for (int kind = 0; kind < 3; ++kind) {
    if (!is_packed(p.from[kind], width) || !is_packed(p.to[kind], width)) width = 1;
  }
  return width;
}

}  // namespace

template <typename T>
cudaError_t launch_rotary(cudaStream_t stream, const Rotary<T>& p) {
  return dispatch_width<T>(width_of_heads(p), [&](auto width) {
    // a thread keeps its token's angles and handles ROTARY_HEADS heads at a time; a block handles as many tokens as fit
    const int packs = std::min(p.half / width.value, ROTARY_THREADS);
    const int most = ROTARY_THREADS / packs;
    const int rounds = int(divide_up(p.heads, int64_t(most) * ROTARY_HEADS));
    const int height = int(divide_up(p.heads, int64_t(rounds) * ROTARY_HEADS));
    const int depth = std::min(most / height, 64);  // a block may have at most 64 along z
    return launch(stream, rotary<T, width.value>, divide_up(p.tokens, depth), dim3(packs, height, depth), p);
  });
}

#define INSTANTIATE(T) template cudaError_t launch_rotary(cudaStream_t, const Rotary<T>&);
MEGATRAIN_FOR_FLOATING(INSTANTIATE)

}  // namespace megatrain
