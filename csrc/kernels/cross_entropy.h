// The two passes of softmax cross entropy over rows of logits. Columns at or past `real` are padding.
#pragma once

#include "elements.h"

namespace megatrain {

template <typename T>
struct LossStatistics {
  const T* logits;
  const int64_t* labels;
  wide_t<T>* out;  // [2 or 3, rows]: log of the sum of exponentials, the target's logit, the sum of the real logits
  int64_t rows, columns, real, first_column;
};

// has_sum: `out` has three rows.
template <typename T>
cudaError_t launch_loss_statistics(cudaStream_t stream, const LossStatistics<T>& p, bool has_sum);

template <typename T>
struct LossGradient {
  T* logits;  // replaced by the gradient
  const int64_t* labels;
  const wide_t<T>* lse;
  const wide_t<T>* grad;  // of each row's loss
  int64_t rows, columns, real, first_column;
  wide_t<T> twice_z_loss;
  wide_t<T> of_target;  // the weight of the target: 1 without smoothing
  wide_t<T> of_each;    // the further weight of every real column: 0 without smoothing
};

template <typename T>
cudaError_t launch_loss_gradient(cudaStream_t stream, const LossGradient<T>& p);

}  // namespace megatrain
