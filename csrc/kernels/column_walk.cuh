// How threads are assigned to [rows, columns] where each column has its own bias or sum: a thread keeps one pack of
// columns and walks down the rows, several at a time, so that their loads are in flight together.
#pragma once

#include <cstdint>

#include "pack.cuh"

namespace megatrain {

constexpr int WALK_ROWS = 4;        // rows at a time: 64 bytes for each thread and tensor in flight
constexpr int WALK_THREADS = 128;   // threads of a block: few, so that a block fits most numbers of columns
constexpr int WALK_MIN_BLOCKS = 4;  // blocks of a multiprocessor: leaves each thread 128 registers

struct ColumnWalk {
  int64_t rows;
  int64_t columns;
  int tiles;  // blocks side by side; the grid has this number for each band of rows
};

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
