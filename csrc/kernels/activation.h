// GELU (tanh form) and SwiGLU with the bias of the preceding product, forward and backward.
//
// PARTS = 1: gelu of [rows, columns]. PARTS = 2: silu(gate) * up of [rows, 2, columns]. The bias is added in wide_t<T>.
#pragma once

#include "columns.h"

namespace megatrain {

// Rows at a time. With the bias and sums of two parts in registers too, four rows would not fit into 128 registers.
template <int PARTS, bool IS_BACKWARD, bool HAS_BIAS>
constexpr int activation_rows = PARTS == 2 && IS_BACKWARD && HAS_BIAS ? WALK_ROWS / 2 : WALK_ROWS;

template <typename T>
struct Activation {
  const T* x;
  const T* bias;      // [PARTS, columns], or null
  const T* grad_out;  // only in backward
  T* out;             // the result, or in backward the gradient of x
  wide_t<T>* parts;   // in backward with a bias, [groups of threads, PARTS, columns]: sums of the gradient over rows
  ColumnWalk walk;
};

template <int PARTS, typename T>
cudaError_t launch_activation_forward(cudaStream_t stream, const Activation<T>& p, const WalkShape& shape);
template <int PARTS, typename T>
cudaError_t launch_activation_backward(cudaStream_t stream, const Activation<T>& p, const WalkShape& shape);

}  // namespace megatrain
