// The kernels of activation.h, and their launches.
#include "activation.h"

#include "columns.cuh"
#include "launch.cuh"
#include "pack.cuh"

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

namespace {

// Calls body(constant<WIDTH>, constant<HAS_BIAS>).
template <typename T, typename Body>
cudaError_t dispatch_shape(const Activation<T>& p, const WalkShape& shape, Body&& body) {
  return dispatch_width<T>(shape.width, [&](auto width) {
    return p.bias != nullptr ? body(width, constant<true>{}) : body(width, constant<false>{});
  });
}

}  // namespace

template <int PARTS, typename T>
cudaError_t launch_activation_forward(cudaStream_t stream, const Activation<T>& p, const WalkShape& shape) {
  return dispatch_shape(p, shape, [&](auto width, auto has_bias) {
    return launch(stream, activation_forward<T, width.value, PARTS, has_bias.value>, shape.blocks, shape.block, p);
  });
}

template <int PARTS, typename T>
cudaError_t launch_activation_backward(cudaStream_t stream, const Activation<T>& p, const WalkShape& shape) {
  return dispatch_shape(p, shape, [&](auto width, auto has_bias) {
    return launch(stream, activation_backward<T, width.value, PARTS, has_bias.value>, shape.blocks, shape.block, p);
  });
}

#define INSTANTIATE(T)                                                                                       \
  template cudaError_t launch_activation_forward<1>(cudaStream_t, const Activation<T>&, const WalkShape&);  \
  template cudaError_t launch_activation_forward<2>(cudaStream_t, const Activation<T>&, const WalkShape&);  \
  template cudaError_t launch_activation_backward<1>(cudaStream_t, const Activation<T>&, const WalkShape&); \
  template cudaError_t launch_activation_backward<2>(cudaStream_t, const Activation<T>&, const WalkShape&);
MEGATRAIN_FOR_FLOATING(INSTANTIATE)

}  // namespace megatrain
