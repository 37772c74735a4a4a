// GELU (tanh form) and SwiGLU with the bias of the preceding product, forward and backward.
//
// PARTS = 1: gelu of [rows, columns]. PARTS = 2: silu(gate) * up of [rows, 2, columns]. The bias is added in wide_t<T>.
#pragma once

#include "columns.cuh"

namespace megatrain {

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// 1 / (1 + exp(-x)). For 16-bit types the hardware's fast functions are used. Their relative error of about 1e-6 is small
// enough, and with them the arithmetic takes much less time than the memory traffic.
template <typename T>
__device__ __forceinline__ wide_t<T> logistic(wide_t<T> x) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else {
    return wide_t<T>(1) / (wide_t<T>(1) + exponential(-x));
  }
}

// gelu(x) = x * (1 + tanh(u)) / 2 = x * logistic(2 u), 2 u = x * (LINEAR + CUBIC * x^2).
template <typename A>
struct GeluTerms {
  static constexpr A LINEAR = A(1.5957691216057307711);   // 2 * sqrt(2 / pi)
  static constexpr A CUBIC = A(0.071354816272600248429);  // LINEAR * 0.044715
};

template <typename T, int PARTS>
__device__ __forceinline__ wide_t<T> activate(const wide_t<T> (&x)[PARTS]) {
  using A = wide_t<T>;
  if constexpr (PARTS == 1) {
    return x[0] * logistic<T>(x[0] * (GeluTerms<A>::LINEAR + GeluTerms<A>::CUBIC * (x[0] * x[0])));
  } else {
    return x[0] * logistic<T>(x[0]) * x[1];
  }
}

// Replaces each part of x by its gradient.
template <typename T, int PARTS>
__device__ __forceinline__ void differentiate(wide_t<T> grad, wide_t<T> (&x)[PARTS]) {
  using A = wide_t<T>;
  if constexpr (PARTS == 1) {
    const A square = x[0] * x[0];
    const A gate = logistic<T>(x[0] * (GeluTerms<A>::LINEAR + GeluTerms<A>::CUBIC * square));
    const A slope = GeluTerms<A>::LINEAR + A(3) * GeluTerms<A>::CUBIC * square;
    x[0] = grad * (gate + x[0] * slope * (gate * (A(1) - gate)));
  } else {
    const A gate = logistic<T>(x[0]);
    const A up = x[1];
    x[1] = grad * (x[0] * gate);
    x[0] = grad * up * (gate + x[0] * gate * (A(1) - gate));
  }
}

// Rows at a time. With the bias and sums of two parts in registers too, four rows would not fit into 128 registers.
template <int PARTS, bool IS_BACKWARD, bool HAS_BIAS>
constexpr int activation_rows = PARTS == 2 && IS_BACKWARD && HAS_BIAS ? WALK_ROWS / 2 : WALK_ROWS;

template <typename T>
struct Activation {
  const T* x;
  const T* bias;      // [PARTS, columns]; null without HAS_BIAS
  const T* grad_out;  // only in backward
  T* out;             // the result, or in backward the gradient of x
  wide_t<T>* parts;   // in backward with a bias, [groups of threads, PARTS, columns]: sums of the gradient over rows
  ColumnWalk walk;
};

template <typename T, int WIDTH, int PARTS>
__device__ __forceinline__ void load_bias(const Activation<T>& p, int64_t column, wide_t<T> (&bias)[PARTS][WIDTH]) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const Pack<T, WIDTH> pack = Pack<T, WIDTH>::load(p.bias + part * p.walk.columns + column);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) bias[part][k] = widen(pack.lane[k]);
  }
}

template <typename T, int WIDTH, int PARTS, bool HAS_BIAS>
__global__ void __launch_bounds__(WALK_THREADS, WALK_MIN_BLOCKS) activation_forward(const Activation<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  constexpr int ROWS = activation_rows<PARTS, false, HAS_BIAS>;
  const Stand<WIDTH> stand(p.walk);
  const int64_t column = stand.column, columns = p.walk.columns;
  if (column >= columns) return;
  A bias[PARTS][WIDTH];
  if constexpr (HAS_BIAS) load_bias(p, column, bias);
  for (int64_t first = stand.group * ROWS; first < p.walk.rows; first += stand.num_groups * ROWS) {
    P x[ROWS][PARTS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= p.walk.rows) continue;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) x[r][part] = P::load(p.x + ((first + r) * PARTS + part) * columns + column);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= p.walk.rows) continue;
      P out;
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) {
        A value[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          value[part] = widen(x[r][part].lane[k]);
          if constexpr (HAS_BIAS) value[part] += bias[part][k];
        }
        out.lane[k] = narrow<T>(activate<T, PARTS>(value));
      }
      out.store(p.out + (first + r) * columns + column);
    }
  }
}

template <typename T, int WIDTH, int PARTS, bool HAS_BIAS>
__global__ void __launch_bounds__(WALK_THREADS, WALK_MIN_BLOCKS) activation_backward(const Activation<T> p) {
  using A = wide_t<T>;
  using P = Pack<T, WIDTH>;
  constexpr int ROWS = activation_rows<PARTS, true, HAS_BIAS>;
  const Stand<WIDTH> stand(p.walk);
  const int64_t column = stand.column, columns = p.walk.columns;
  if (column >= columns) return;
  A bias[PARTS][WIDTH], sum[PARTS][WIDTH] = {};
  if constexpr (HAS_BIAS) load_bias(p, column, bias);
  for (int64_t first = stand.group * ROWS; first < p.walk.rows; first += stand.num_groups * ROWS) {
    P grad[ROWS], x[ROWS][PARTS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= p.walk.rows) continue;
      grad[r] = P::load(p.grad_out + (first + r) * columns + column);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) x[r][part] = P::load(p.x + ((first + r) * PARTS + part) * columns + column);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= p.walk.rows) continue;
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) {
        A value[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          value[part] = widen(x[r][part].lane[k]);
          if constexpr (HAS_BIAS) value[part] += bias[part][k];
        }
        differentiate<T, PARTS>(widen(grad[r].lane[k]), value);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          if constexpr (HAS_BIAS) sum[part][k] += value[part];
          x[r][part].lane[k] = narrow<T>(value[part]);
        }
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) x[r][part].store(p.out + ((first + r) * PARTS + part) * columns + column);
    }
  }
  if constexpr (!HAS_BIAS) return;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) p.parts[(stand.group * PARTS + part) * columns + column + k] = sum[part][k];
  }
}

}  // namespace megatrain
