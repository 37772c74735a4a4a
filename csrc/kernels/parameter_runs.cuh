// The run of each element of a flat shard (optimizer_step.h), looked up once for a tile where that is possible.
#pragma once

#include "optimizer_step.h"

namespace megatrain {

// The run that contains `position`; runs.count in the padding.
__device__ __forceinline__ int run_at(const ParameterRuns& runs, int64_t position) {
  int low = 0, high = runs.count;  // searches for the first run that ends after `position`
  while (low < high) {
    const int middle = (low + high) / 2;
    if (runs.borders[middle + 1] <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
__device__ __forceinline__ bool decays(const ParameterRuns& runs, int run) {
  return runs.is_decayed != nullptr && run < runs.count && runs.is_decayed[run];
}

// The runs of [begin, end). It is nearly always one run; only otherwise is the run of each element looked up.
struct RunsOfTile {
  const ParameterRuns& runs;
  int first;
  bool is_one;
  bool first_decays;

  __device__ __forceinline__ RunsOfTile(const ParameterRuns& runs, int64_t begin, int64_t end)
      : runs(runs), first(run_at(runs, begin)), is_one(first == runs.count || end <= runs.borders[first + 1]),
        first_decays(decays(runs, first)) {}
  // Bit k: whether the element at position + k is decayed. With bits, the arithmetic that follows has no branch.
  template <int WIDTH>
  __device__ __forceinline__ unsigned decayed_lanes(int64_t position) const {
    if (is_one) return first_decays ? ~0u : 0u;
    unsigned lanes = 0;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) lanes |= unsigned(decays(runs, run_at(runs, position + k))) << k;
    return lanes;
  }
};

}  // namespace megatrain
