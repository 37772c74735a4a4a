// The results of an element depend only on its own values, the scalars and its run's ratio, to the last bit,
// for any width of the packs and any place in the shard: a product is fused with the following sum only where
// fused_multiply_add is called.
#include "optimizer_step.h"

#include "launch.cuh"
#include "pack.cuh"
#include "parameter_runs.cuh"
#include "row_sum.cuh"

namespace megatrain {

constexpr int STEP_THREADS = 256;
// Packs of each tensor that a thread loads before it uses the first: 128 bytes in flight with four tensors.
constexpr int STEP_PACKS = 2;
constexpr int APPLY_PACKS = 4;  // the same, where two tensors are read

// Updates both moments and returns the divisor of the first one. Rounds where torch's CPU kernels round.
// Source: arXiv:1412.6980, Algorithm 1.
template <typename A>
__device__ __forceinline__ A update_moments(const MomentScalars<A>& s, A gradient, A& exp_avg, A& exp_avg_sq) {
  const A scaled = product(gradient, s.gradient_scale);
  // interpolate from the nearer end, which is exact where beta1 is 0
  const A change = scaled - exp_avg;
  exp_avg = s.rest1 < A(0.5) ? fused_multiply_add(s.rest1, change, exp_avg)
                             : fused_multiply_add(s.rest1 - A(1), change, scaled);
  exp_avg_sq = fused_multiply_add(product(s.rest2, scaled), scaled, product(exp_avg_sq, s.beta2));
  return square_root(exp_avg_sq) / s.root_correction2 + s.eps;
}

template <typename G, typename T, int WIDTH>
__global__ void __launch_bounds__(STEP_THREADS) adamw(const AdamwStep<G, T> p) {
  using P = Pack<T, WIDTH>;
  constexpr int STRIDE = STEP_THREADS * WIDTH;
  const int64_t begin = int64_t(blockIdx.x) * STRIDE * STEP_PACKS;
  const int64_t end = begin + STRIDE * STEP_PACKS < p.count ? begin + STRIDE * STEP_PACKS : p.count;
  const int64_t first = begin + threadIdx.x * WIDTH;
  Pack<G, WIDTH> grad[STEP_PACKS];
  P master[STEP_PACKS], exp_avg[STEP_PACKS], exp_avg_sq[STEP_PACKS];
#pragma unroll
  for (int i = 0; i < STEP_PACKS; ++i) {
    const int64_t place = first + i * STRIDE;
    if (place >= end) continue;
    grad[i] = Pack<G, WIDTH>::load(p.grad + place);
    master[i] = P::load(p.master + place);
    exp_avg[i] = P::load(p.exp_avg + place);
    exp_avg_sq[i] = P::load(p.exp_avg_sq + place);
  }
  const RunsOfTile tile(p.runs, begin, end);  // looked up while these loads are in flight
#pragma unroll
  for (int i = 0; i < STEP_PACKS; ++i) {
    const int64_t place = first + i * STRIDE;
    if (place >= end) continue;
    Pack<__nv_bfloat16, WIDTH> rounded;
    const unsigned decayed = tile.decayed_lanes<WIDTH>(place);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      const T denominator =
          update_moments(p.moments, T(widen(grad[i].lane[k])), exp_avg[i].lane[k], exp_avg_sq[i].lane[k]);
      T& weight = master[i].lane[k];
      weight = product(weight, decayed >> k & 1 ? p.kept : T(1));
      weight += product(p.step_size, exp_avg[i].lane[k]) / denominator;
      rounded.lane[k] = narrow<__nv_bfloat16>(float(weight));
    }
    exp_avg[i].store(p.exp_avg + place);
    exp_avg_sq[i].store(p.exp_avg_sq + place);
    master[i].store(p.master + place);
    if (p.published != nullptr) rounded.store(p.published + place);
  }
}

template <typename T>
__device__ __forceinline__ void add_squares(double (&squares)[2], T weight, T direction) {
  squares[0] += double(weight) * double(weight);
  squares[1] += double(direction) * double(direction);
}

__device__ __forceinline__ void store_pair(double* pairs, int64_t number, const double (&pair)[2]) {
  pairs[2 * number] = pair[0];
  pairs[2 * number + 1] = pair[1];
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(STEP_THREADS) lamb_direction(const LambDirection<T> p) {
  using P = Pack<T, WIDTH>;
  constexpr int STRIDE = STEP_THREADS * WIDTH;
  const int64_t begin = int64_t(blockIdx.x) * LAMB_TILE;
  const int64_t end = begin + LAMB_TILE < p.count ? begin + LAMB_TILE : p.count;
  const RunsOfTile tile(p.runs, begin, end);
  double squares[2] = {};
  for (int64_t first = begin + threadIdx.x * WIDTH; first < end; first += STRIDE * STEP_PACKS) {
    P grad[STEP_PACKS], master[STEP_PACKS], exp_avg[STEP_PACKS], exp_avg_sq[STEP_PACKS];
#pragma unroll
    for (int i = 0; i < STEP_PACKS; ++i) {
      const int64_t place = first + i * STRIDE;
      if (place >= end) continue;
      grad[i] = P::load(p.grad + place);
      master[i] = P::load(p.master + place);
      exp_avg[i] = P::load(p.exp_avg + place);
      exp_avg_sq[i] = P::load(p.exp_avg_sq + place);
    }
#pragma unroll
    for (int i = 0; i < STEP_PACKS; ++i) {
      const int64_t place = first + i * STRIDE;
      if (place >= end) continue;
      const unsigned decayed = tile.decayed_lanes<WIDTH>(place);
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) {
        const T denominator = update_moments(p.moments, grad[i].lane[k], exp_avg[i].lane[k], exp_avg_sq[i].lane[k]);
        T direction = exp_avg[i].lane[k] / p.correction1 / denominator;
        if (decayed >> k & 1) direction = fused_multiply_add(p.weight_decay, master[i].lane[k], direction);
        add_squares(squares, master[i].lane[k], direction);
        grad[i].lane[k] = direction;
      }
      exp_avg[i].store(p.exp_avg + place);
      exp_avg_sq[i].store(p.exp_avg_sq + place);
      grad[i].store(p.grad + place);
    }
  }
  if (tile.is_one) {
    if (tile.first == p.runs.count) return;  // padding
    sum_over_row(squares);
    if (threadIdx.x == 0) store_pair(p.parts, int64_t(blockIdx.x) + tile.first, squares);
    return;
  }
  // Few tiles have more than one run, but a tile may have many short runs. A warp handles one run and reads it again.
  __syncthreads();  // all directions are written
  const int lane = threadIdx.x % WARP;
  for (int run = tile.first + threadIdx.x / WARP; run < p.runs.count && p.runs.borders[run] < end; run += STEP_THREADS / WARP) {
    const int64_t from = p.runs.borders[run] > begin ? p.runs.borders[run] : begin;
    const int64_t to = p.runs.borders[run + 1] < end ? p.runs.borders[run + 1] : end;
    double of_run[2] = {};
#pragma unroll 4
    for (int64_t place = from + lane; place < to; place += WARP) add_squares(of_run, p.master[place], p.grad[place]);
    of_run[0] = warp_sum(of_run[0]);
    of_run[1] = warp_sum(of_run[1]);
    if (lane == 0) store_pair(p.parts, int64_t(blockIdx.x) + run, of_run);
  }
}

// sums [runs, 2]: a block adds the parts of one run, in an order that depends only on the run's place in the shard.
__global__ void __launch_bounds__(STEP_THREADS)
    lamb_square_sums(const double* parts, double* sums, const ParameterRuns runs) {
  const int run = blockIdx.x;
  const int64_t start = runs.borders[run], stop = runs.borders[run + 1];
  double squares[2] = {};
  if (start < stop) {
    const int64_t last = run + (stop - 1) / LAMB_TILE;
#pragma unroll 4
    for (int64_t part = run + start / LAMB_TILE + threadIdx.x; part <= last; part += STEP_THREADS) {
      squares[0] += parts[2 * part];
      squares[1] += parts[2 * part + 1];
    }
  }
  sum_over_row(squares);
  if (threadIdx.x == 0) store_pair(sums, run, squares);
}

template <typename T, int WIDTH>
__global__ void __launch_bounds__(STEP_THREADS) lamb_apply(const LambApply<T> p) {
  using P = Pack<T, WIDTH>;
  constexpr int STRIDE = STEP_THREADS * WIDTH;
  const int64_t begin = int64_t(blockIdx.x) * STRIDE * APPLY_PACKS;
  const int64_t end = begin + STRIDE * APPLY_PACKS < p.count ? begin + STRIDE * APPLY_PACKS : p.count;
  const int64_t first = begin + threadIdx.x * WIDTH;
  P direction[APPLY_PACKS], master[APPLY_PACKS];
#pragma unroll
  for (int i = 0; i < APPLY_PACKS; ++i) {
    const int64_t place = first + i * STRIDE;
    if (place >= end) continue;
    direction[i] = P::load(p.direction + place);
    master[i] = P::load(p.master + place);
  }
  const RunsOfTile tile(p.runs, begin, end);
  const auto ratio_of = [&](int run) { return run < p.runs.count ? T(p.ratios[run]) : T(1); };
  const T first_ratio = ratio_of(tile.first);
#pragma unroll
  for (int i = 0; i < APPLY_PACKS; ++i) {
    const int64_t place = first + i * STRIDE;
    if (place >= end) continue;
    T ratio[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) ratio[k] = first_ratio;
    if (!tile.is_one) {
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) ratio[k] = ratio_of(run_at(p.runs, place + k));
    }
    Pack<__nv_bfloat16, WIDTH> rounded;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      T& weight = master[i].lane[k];
      weight = fused_multiply_add(-p.lr, product(direction[i].lane[k], ratio[k]), weight);
      rounded.lane[k] = narrow<__nv_bfloat16>(float(weight));
    }
    master[i].store(p.master + place);
    if (p.published != nullptr) rounded.store(p.published + place);
  }
}

template <typename G, typename T>
cudaError_t launch_adamw(cudaStream_t stream, const AdamwStep<G, T>& p) {
  const int fitting = pack_width<T>(p.count, {p.grad, p.master, p.exp_avg, p.exp_avg_sq, p.published});
  return dispatch_width<T>(fitting, [&](auto width) {
    // one block for each tile: many short blocks overlap each other's loads and stores, and need no loop
    const int64_t tiles = divide_up(p.count, STEP_THREADS * width.value * STEP_PACKS);
    return launch(stream, adamw<G, T, width.value>, tiles, dim3(STEP_THREADS), p);
  });
}

template <typename T>
cudaError_t launch_lamb_direction(cudaStream_t stream, const LambDirection<T>& p) {
  return dispatch_width<T>(pack_width<T>(p.count, {p.grad, p.master, p.exp_avg, p.exp_avg_sq}), [&](auto width) {
    return launch(stream, lamb_direction<T, width.value>, divide_up(p.count, LAMB_TILE), dim3(STEP_THREADS), p);
  });
}

cudaError_t launch_lamb_square_sums(cudaStream_t stream, const double* parts, double* sums, const ParameterRuns& runs) {
  return launch(stream, lamb_square_sums, runs.count, dim3(STEP_THREADS), parts, sums, runs);
}

template <typename T>
cudaError_t launch_lamb_apply(cudaStream_t stream, const LambApply<T>& p) {
  return dispatch_width<T>(pack_width<T>(p.count, {p.direction, p.master, p.published}), [&](auto width) {
    const int64_t tiles = divide_up(p.count, STEP_THREADS * width.value * APPLY_PACKS);
    return launch(stream, lamb_apply<T, width.value>, tiles, dim3(STEP_THREADS), p);
  });
}

template cudaError_t launch_adamw(cudaStream_t, const AdamwStep<__nv_bfloat16, float>&);
template cudaError_t launch_adamw(cudaStream_t, const AdamwStep<float, float>&);
template cudaError_t launch_adamw(cudaStream_t, const AdamwStep<double, double>&);
template cudaError_t launch_lamb_direction(cudaStream_t, const LambDirection<float>&);
template cudaError_t launch_lamb_direction(cudaStream_t, const LambDirection<double>&);
template cudaError_t launch_lamb_apply(cudaStream_t, const LambApply<float>&);
template cudaError_t launch_lamb_apply(cudaStream_t, const LambApply<double>&);

}  // namespace megatrain
