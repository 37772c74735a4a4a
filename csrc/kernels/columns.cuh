// The place of a thread in a walk down columns (columns.h).
#pragma once

#include "columns.h"

namespace megatrain {

template <int WIDTH>
struct Stand {
  int64_t column;      // the first column of the thread's pack
  int64_t group;       // the thread's group; the groups divide the rows among themselves
  int64_t num_groups;

  __device__ __forceinline__ explicit Stand(const ColumnWalk& walk)
      : column((int64_t(blockIdx.x % walk.tiles) * blockDim.x + threadIdx.x) * WIDTH),
        group(int64_t(blockIdx.x / walk.tiles) * blockDim.y + threadIdx.y),
        num_groups(int64_t(gridDim.x / walk.tiles) * blockDim.y) {}
};

}  // namespace megatrain
