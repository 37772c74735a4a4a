// AdamW and LAMB over a flat shard. AdamW reads and writes every tensor once. LAMB takes two passes: the direction, and
// then the update with the ratios.
#pragma once

#include "elements.h"

namespace megatrain {

// The parameter of each element of a flat shard: parameters follow each other, and padding follows the last one. Run r is
// [borders[r], borders[r + 1]). It is empty where the shard holds nothing of the parameter. borders[0] is 0.
struct ParameterRuns {
  const int64_t* borders;  // [count + 1], ascending
  const bool* is_decayed;  // [count], or null where the kernel applies no weight decay
  int count;
};

template <typename A>
struct MomentScalars {
  A gradient_scale;
  A rest1;  // 1 - beta1
  A beta2;
  A rest2;             // 1 - beta2
  A root_correction2;  // sqrt(1 - beta2^t)
  A eps;
};

template <typename G, typename T>
struct AdamwStep {
  const G* grad;
  T* master;
  T* exp_avg;
  T* exp_avg_sq;
  __nv_bfloat16* published;  // null: the master weights are the parameters
  int64_t count;
  ParameterRuns runs;
  MomentScalars<T> moments;
  T kept;       // the factor of weight decay: 1 - lr * weight_decay
  T step_size;  // -lr / (1 - beta1^t)
};

template <typename G, typename T>
cudaError_t launch_adamw(cudaStream_t stream, const AdamwStep<G, T>& p);

constexpr int LAMB_TILE = 8192;  // elements of a block, which writes one partial sum for each of its runs

template <typename T>
struct LambDirection {
  T* grad;  // becomes the direction
  const T* master;
  T* exp_avg;
  T* exp_avg_sq;
  // [tiles + runs, 2]: sums of squares of weight and direction. Row tile + run is for the run's elements in the tile. From
  // one pair (tile, run) to the next, one of the two numbers grows. So no two pairs use one row, and a run's parts are
  // adjacent.
  double* parts;
  int64_t count;
  ParameterRuns runs;
  MomentScalars<T> moments;
  T correction1;  // 1 - beta1^t
  T weight_decay;
};

template <typename T>
cudaError_t launch_lamb_direction(cudaStream_t stream, const LambDirection<T>& p);
// sums [runs, 2]: the parts of each run, added.
cudaError_t launch_lamb_square_sums(cudaStream_t stream, const double* parts, double* sums, const ParameterRuns& runs);

template <typename T>
struct LambApply {
  const T* direction;
  T* master;
  __nv_bfloat16* published;  // null: the master weights are the parameters
  int64_t count;
  ParameterRuns runs;
  const double* ratios;  // [runs]; padding uses 1
  T lr;
};

template <typename T>
cudaError_t launch_lamb_apply(cudaStream_t stream, const LambApply<T>& p);

}  // namespace megatrain
