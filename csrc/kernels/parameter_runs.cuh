// Which parameter an element of a flat share belongs to: parameters lie end to end, and padding follows the last one.
#pragma once

#include <cstdint>

namespace megatrain {

// Run number r is [borders[r], borders[r + 1]), empty where the share holds nothing of the parameter; borders[0] is 0.
struct ParameterRuns {
  const int64_t* borders;  // [count + 1], ascending
  const bool* is_decayed;  // [count]
  int count;

  // The run that `position` lies in, `count` in the padding.
  __device__ __forceinline__ int at(int64_t position) const {
    int low = 0, high = count;  // the least run that ends after `position`
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
  __device__ __forceinline__ bool decays(int run) const { return run < count && is_decayed[run]; }
};

// The runs of [begin, end), which is one run nearly always: elements are asked one by one only where it is not.
struct RunsOfTile {
  const ParameterRuns& runs;
  int first;
  bool is_one;
  bool first_decays;

  __device__ __forceinline__ RunsOfTile(const ParameterRuns& runs, int64_t begin, int64_t end)
      : runs(runs), first(runs.at(begin)), is_one(first == runs.count || end <= runs.borders[first + 1]),
        first_decays(runs.decays(first)) {}
  __device__ __forceinline__ bool decays(int64_t position) const {
    return is_one ? first_decays : runs.decays(runs.at(position));
  }
};

}  // namespace megatrain
