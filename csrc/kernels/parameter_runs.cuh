// The parameter of each element of a flat shard: parameters follow each other, and padding follows the last one.
#pragma once

#include <cstdint>

namespace megatrain {

// Run r is [borders[r], borders[r + 1]). It is empty where the shard holds nothing of the parameter. borders[0] is 0.
struct ParameterRuns {
  const int64_t* borders;  // [count + 1], ascending
  const bool* is_decayed;  // [count], or null where the kernel applies no weight decay
  int count;

  // The run that contains `position`; `count` in the padding.
  __device__ __forceinline__ int at(int64_t position) const {
    int low = 0, high = count;  // searches the first run that ends after `position`
    while (low < high) {
      const int middle = (low + high) / 2;
      if (borders[middle + 1] <= position) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  __device__ __forceinline__ bool decays(int run) const {
    return is_decayed != nullptr && run < count && is_decayed[run];
  }
};

// The runs of [begin, end). It is nearly always one run; only otherwise is the run of each element looked up.
struct RunsOfTile {
  const ParameterRuns& runs;
  int first;
  bool is_one;
  bool first_decays;

  __device__ __forceinline__ RunsOfTile(const ParameterRuns& runs, int64_t begin, int64_t end)
      : runs(runs), first(runs.at(begin)), is_one(first == runs.count || end <= runs.borders[first + 1]),
        first_decays(runs.decays(first)) {}
  // Bit k: whether the element at position + k is decayed. With bits, the arithmetic that follows has no branch.
  template <int WIDTH>
  __device__ __forceinline__ unsigned decayed_lanes(int64_t position) const {
    if (is_one) return first_decays ? ~0u : 0u;
    unsigned lanes = 0;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) lanes |= unsigned(runs.decays(runs.at(position + k))) << k;
    return lanes;
  }
};

}  // namespace megatrain
