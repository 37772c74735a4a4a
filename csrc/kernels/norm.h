// LayerNorm and RMSNorm over rows of `hidden` elements, with the preceding addition to the residual stream.
//
// IS_CENTERED: LayerNorm (mean removed, bias added); otherwise RMSNorm.
#pragma once

#include "elements.h"

namespace megatrain {

template <typename T>
struct NormForward {
  const T* x;
  const T* residual;  // null: nothing is added
  const T* weight;
  const T* bias;  // only LayerNorm
  T* out;
  T* sum;           // x + residual, rounded; null without residual
  wide_t<T>* mean;  // only LayerNorm
  wide_t<T>* rstd;
  int64_t rows;
  int hidden;
  wide_t<T> eps;
};

template <bool IS_CENTERED, typename T>
cudaError_t launch_norm_forward(cudaStream_t stream, const NormForward<T>& p);

template <typename T>
struct NormBackward {
  const T* grad_out;
  const T* grad_sum;  // the gradient that reaches the sum directly, not through the norm; null without residual
  const T* x;         // the input of the norm: with a residual, the sum
  const T* weight;
  const wide_t<T>* mean;
  const wide_t<T>* rstd;
  T* grad_x;
  wide_t<T>* weight_parts;  // [NormBackwardShape::parts(), hidden]: sums over the rows of one group of threads
  wide_t<T>* bias_parts;    // the same for the bias, only LayerNorm
  int64_t rows;
  int hidden;
};

// How the rows of a backward pass are divided among groups of threads. The number of parts is the number of groups.
struct NormBackwardShape {
  int width;  // elements of a pack
  int threads, rows_a_block, blocks, packs;
  int64_t parts() const { return int64_t(blocks) * rows_a_block; }
};

NormBackwardShape norm_backward_shape(int num_multiprocessors, int64_t rows, int hidden, int width);

template <bool IS_CENTERED, typename T>
cudaError_t launch_norm_backward(cudaStream_t stream, const NormBackward<T>& p, const NormBackwardShape& shape);

}  // namespace megatrain
