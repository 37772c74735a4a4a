// How threads are dealt over [rows, columns] where each column has something of its own, a bias or a sum: a thread keeps
// one pack of columns and walks down the rows, several at a time, whose loads are in flight together.
#pragma once

#include <cstdint>

#include "pack.cuh"

namespace megatrain {

constexpr int WALK_ROWS = 4;        // at a time: 64 bytes a thread and tensor in flight
constexpr int WALK_THREADS = 128;   // a block: few, so that its size fits most numbers of columns
constexpr int WALK_MIN_BLOCKS = 4;  // a multiprocessor: leaves each thread 128 registers

struct ColumnWalk {
  int64_t rows;
  int64_t columns;
  int tiles;  // blocks side by side; the grid has so many for each band of rows
};

template <int WIDTH>
struct Stand {
  int64_t column;      // of its pack
  int64_t group;       // which of the groups of threads that share the rows
  int64_t num_groups;

  __device__ __forceinline__ explicit Stand(const ColumnWalk& walk)
      : column((int64_t(blockIdx.x % walk.tiles) * blockDim.x + threadIdx.x) * WIDTH),
        group(int64_t(blockIdx.x / walk.tiles) * blockDim.y + threadIdx.y),
        num_groups(int64_t(gridDim.x / walk.tiles) * blockDim.y) {}
};

}  // namespace megatrain
