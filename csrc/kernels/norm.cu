// blockDim.x threads hold a row, each with PACKS packs of WIDTH elements, so that memory is read once. PACKS = 0 is for rows
// that do not fit into registers and are read again.
#include "norm.h"

#include <algorithm>

#include "launch.cuh"
#include "pack.cuh"
#include "row_sum.cuh"

namespace megatrain {

constexpr int NORM_MAX_THREADS = 512;  // threads of a block: leaves each thread 128 registers

template <typename T, int WIDTH, int PACKS, bool IS_CENTERED>
__global__ void __launch_bounds__(NORM_MAX_THREADS) norm_forward(const NormForward<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_active = row < p.rows;
  const int64_t base = row * p.hidden;
  const int step = blockDim.x * WIDTH;
  const int first = threadIdx.x * WIDTH;
  constexpr bool is_cached = PACKS > 0;
  P cached[is_cached ? PACKS : 1];

  const auto read = [&](int column) {
    P x = P::load(p.x + base + column);
    if (p.residual != nullptr) {
      const P residual = P::load(p.residual + base + column);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) x.lane[i] = narrow<T>(widen(x.lane[i]) + widen(residual.lane[i]));
    }
    return x;
  };
  // calls use(x, column) for each pack of this thread
  const auto each = [&](auto use) {
    if (!is_active) return;
    if constexpr (is_cached) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        if (first + i * step < p.hidden) use(cached[i], first + i * step);
      }
    } else {
      for (int column = first; column < p.hidden; column += step) use(read(column), column);
    }
  };

  if constexpr (is_cached) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (is_active && first + i * step < p.hidden) cached[i] = read(first + i * step);
    }
  }
  A mean = 0;
  if constexpr (IS_CENTERED) {
    A sums[1] = {0};
    each([&](const P& x, int) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) sums[0] += widen(x.lane[i]);
    });
    sum_over_row(sums);
    mean = sums[0] / p.hidden;
  }
  A squares[1] = {0};
  each([&](const P& x, int) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const A distance = widen(x.lane[i]) - mean;
      squares[0] += distance * distance;
    }
  });
  sum_over_row(squares);
  const A rstd = reciprocal_root(squares[0] / p.hidden + p.eps);
  if (is_active && threadIdx.x == 0) {
    if constexpr (IS_CENTERED) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  each([&](const P& x, int column) {
    const P weight = P::load(p.weight + column);
    P bias, out;
    if constexpr (IS_CENTERED) bias = P::load(p.bias + column);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      A value = (widen(x.lane[i]) - mean) * rstd * widen(weight.lane[i]);
      if constexpr (IS_CENTERED) value += widen(bias.lane[i]);
      out.lane[i] = narrow<T>(value);
    }
    if (p.sum != nullptr) x.store(p.sum + base + column);
    out.store(p.out + base + column);
  });
}

// Each group of threads handles ROWS rows at a time, so that their loads are in flight together, and keeps the sums of
// its columns in registers. There are no atomics, and the shape of the launch fixes the order of additions.
template <typename T, int WIDTH, int PACKS, int ROWS, bool IS_CENTERED>
__global__ void __launch_bounds__(NORM_MAX_THREADS) norm_backward(const NormBackward<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  const int step = blockDim.x * WIDTH;
  const int first = threadIdx.x * WIDTH;
  const int64_t group = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t num_groups = int64_t(gridDim.x) * blockDim.y;
  A weight_sum[PACKS][WIDTH] = {};
  A bias_sum[PACKS][WIDTH] = {};

  // all groups of a block run the same number of rounds, because they meet at barriers
  const int64_t rounds = (p.rows + num_groups * ROWS - 1) / (num_groups * ROWS);
  for (int64_t round = 0; round < rounds; ++round) {
    P grad[ROWS][PACKS], x[ROWS][PACKS];
    A mean[ROWS], rstd[ROWS];
    A sums[2 * ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t row = (round * num_groups + group) * ROWS + r;
      const bool is_active = row < p.rows;
      rstd[r] = is_active ? p.rstd[row] : A(0);
      mean[r] = IS_CENTERED && is_active ? p.mean[row] : A(0);
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int column = first + i * step;
        if (is_active && column < p.hidden) {
          grad[r][i] = P::load(p.grad_out + row * p.hidden + column);
          x[r][i] = P::load(p.x + row * p.hidden + column);
        } else {
          grad[r][i] = x[r][i] = P{};
        }
      }
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int column = first + i * step;
      const P weight = column < p.hidden ? P::load(p.weight + column) : P{};
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          const A of_out = widen(grad[r][i].lane[k]);
          const A normed = (widen(x[r][i].lane[k]) - mean[r]) * rstd[r];
          const A of_normed = of_out * widen(weight.lane[k]);
          weight_sum[i][k] += of_out * normed;
          if constexpr (IS_CENTERED) bias_sum[i][k] += of_out;
          sums[2 * r] += of_normed * normed;
          sums[2 * r + 1] += of_normed;
        }
      }
    }
    sum_over_row(sums);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t row = (round * num_groups + group) * ROWS + r;
      if (row >= p.rows) continue;
      const A along = sums[2 * r] / p.hidden;
      const A shared = IS_CENTERED ? sums[2 * r + 1] / p.hidden : A(0);
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int column = first + i * step;
        if (column >= p.hidden) continue;
        const P weight = P::load(p.weight + column);
        P past{}, out;
        if (p.grad_sum != nullptr) past = P::load(p.grad_sum + row * p.hidden + column);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          const A normed = (widen(x[r][i].lane[k]) - mean[r]) * rstd[r];
          const A of_normed = widen(grad[r][i].lane[k]) * widen(weight.lane[k]);
          A value = (of_normed - shared - normed * along) * rstd[r];
          if (p.grad_sum != nullptr) value += widen(past.lane[k]);
          out.lane[k] = narrow<T>(value);
        }
        out.store(p.grad_x + row * p.hidden + column);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int column = first + i * step;
    if (column >= p.hidden) continue;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      p.weight_parts[group * p.hidden + column + k] = weight_sum[i][k];
      if constexpr (IS_CENTERED) p.bias_parts[group * p.hidden + column + k] = bias_sum[i][k];
    }
  }
}

// The same for rows of any length: rows are read twice, and the sums of columns are in memory. A block handles one row
// at a time.
template <typename T, bool IS_CENTERED>
__global__ void __launch_bounds__(NORM_MAX_THREADS) norm_backward_long(const NormBackward<T> p) {
  using A = wide_t<T>;
  A* weight_sum = p.weight_parts + int64_t(blockIdx.x) * p.hidden;
  A* bias_sum = IS_CENTERED ? p.bias_parts + int64_t(blockIdx.x) * p.hidden : nullptr;
  for (int column = threadIdx.x; column < p.hidden; column += blockDim.x) {
    weight_sum[column] = 0;
    if constexpr (IS_CENTERED) bias_sum[column] = 0;
  }
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x = p.x + row * p.hidden;
    const T* grad = p.grad_out + row * p.hidden;
    const A rstd = p.rstd[row];
    const A mean = IS_CENTERED ? p.mean[row] : A(0);
    A sums[2] = {};
    for (int column = threadIdx.x; column < p.hidden; column += blockDim.x) {
      const A of_out = widen(grad[column]);
      const A normed = (widen(x[column]) - mean) * rstd;
      const A of_normed = of_out * widen(p.weight[column]);
      weight_sum[column] += of_out * normed;
      if constexpr (IS_CENTERED) bias_sum[column] += of_out;
      sums[0] += of_normed * normed;
      sums[1] += of_normed;
    }
    sum_over_row(sums);
    const A along = sums[0] / p.hidden;
    const A shared = IS_CENTERED ? sums[1] / p.hidden : A(0);
    for (int column = threadIdx.x; column < p.hidden; column += blockDim.x) {
      const A normed = (widen(x[column]) - mean) * rstd;
      A value = (widen(grad[column]) * widen(p.weight[column]) - shared - normed * along) * rstd;
      if (p.grad_sum != nullptr) value += widen(p.grad_sum[row * p.hidden + column]);
      p.grad_x[row * p.hidden + column] = narrow<T>(value);
    }
  }
}

namespace {

constexpr int FORWARD_PACKS = 4;  // 64 bytes for each thread and tensor in flight
constexpr int FORWARD_BLOCK = 128;
constexpr int BACKWARD_PACKS = 4;  // rows with more packs for each thread are read twice

int threads_for(int pieces) {
  const int threads = int(divide_up(pieces, WARP)) * WARP;
  return threads < WARP ? WARP : threads > NORM_MAX_THREADS ? NORM_MAX_THREADS : threads;
}

// Calls body(constant<PACKS>) with the least of 1, 2, 4 and 8 packs that cover a row, or 0 where none of them does.
template <typename Body>
cudaError_t dispatch_packs(int needed, Body&& body) {
  if (needed <= 1) return body(constant<1>{});
  if (needed <= 2) return body(constant<2>{});
  if (needed <= 4) return body(constant<4>{});
  if (needed <= 8) return body(constant<8>{});
  return body(constant<0>{});
}

}  // namespace

template <bool IS_CENTERED, typename T>
cudaError_t launch_norm_forward(cudaStream_t stream, const NormForward<T>& p) {
  const int fitting = pack_width<T>(p.hidden, {p.x, p.residual, p.weight, p.bias, p.out, p.sum});
  return dispatch_width<T>(fitting, [&](auto width) {
    const int pieces = int(divide_up(p.hidden, width.value));
    const int threads = threads_for(int(divide_up(pieces, FORWARD_PACKS)));
    const int rows_a_block = threads < FORWARD_BLOCK ? FORWARD_BLOCK / threads : 1;
    return dispatch_packs(int(divide_up(pieces, threads)), [&](auto packs) {
      return launch(stream, norm_forward<T, width.value, packs.value, IS_CENTERED>, divide_up(p.rows, rows_a_block),
                    dim3(threads, rows_a_block), p);
    });
  });
}

NormBackwardShape norm_backward_shape(int num_multiprocessors, int64_t rows, int hidden, int width) {
  const int pieces = int(divide_up(hidden, width));
  const int threads = threads_for(pieces);
  const int packs = int(divide_up(pieces, threads));
  const int rows_a_block = packs > BACKWARD_PACKS || threads == NORM_MAX_THREADS ? 1 : NORM_MAX_THREADS / threads;
  const int blocks = int(std::min<int64_t>(divide_up(rows, rows_a_block), num_multiprocessors));
  return {width, threads, rows_a_block, blocks, packs};
}

template <bool IS_CENTERED, typename T>
cudaError_t launch_norm_backward(cudaStream_t stream, const NormBackward<T>& p, const NormBackwardShape& shape) {
  const dim3 block(shape.threads, shape.rows_a_block);
  if (shape.packs > BACKWARD_PACKS) return launch(stream, norm_backward_long<T, IS_CENTERED>, shape.blocks, block, p);
  return dispatch_width<T>(shape.width, [&](auto width) {
    const auto with = [&](auto packs, auto rows) {
      return launch(stream, norm_backward<T, width.value, packs.value, rows.value, IS_CENTERED>, shape.blocks, block, p);
    };
    if (shape.packs <= 1) return with(constant<1>{}, constant<4>{});
    if (shape.packs <= 2) return with(constant<2>{}, constant<2>{});
    return with(constant<4>{}, constant<1>{});
  });
}

#define INSTANTIATE_FOR(IS_CENTERED, T)                                                        \
  template cudaError_t launch_norm_forward<IS_CENTERED>(cudaStream_t, const NormForward<T>&);  \
  template cudaError_t launch_norm_backward<IS_CENTERED>(cudaStream_t, const NormBackward<T>&, const NormBackwardShape&);
#define INSTANTIATE(T)      \
  INSTANTIATE_FOR(false, T) \
  INSTANTIATE_FOR(true, T)
MEGATRAIN_FOR_FLOATING(INSTANTIATE)

}  // namespace megatrain
