// Kernels over [rows, columns] where each column has its own bias or sum: the shape of their grids, and the sum of parts.
#pragma once

#include "elements.h"

namespace megatrain {

// How threads are assigned: a thread keeps one pack of columns and walks down the rows, several at a time, so that
// their loads are in flight together.
constexpr int WALK_ROWS = 4;        // rows at a time: 64 bytes for each thread and tensor in flight
constexpr int WALK_THREADS = 128;   // threads of a block: few, so that a block fits most numbers of columns
constexpr int WALK_MIN_BLOCKS = 4;  // blocks of a multiprocessor: leaves each thread 128 registers

struct ColumnWalk {
  int64_t rows;
  int64_t columns;
  int tiles;  // blocks side by side; the grid has this number for each band of rows
};

struct WalkShape {
  ColumnWalk walk;
  int width;  // elements of a pack
  int64_t blocks;
  dim3 block;
  int64_t groups() const { return blocks / walk.tiles * block.y; }  // of threads, which divide the rows among themselves
};

// out [columns] = sum of parts [num_parts, columns] over the parts, in an order that depends only on their number.
template <typename T>
cudaError_t launch_column_sum(cudaStream_t stream, const wide_t<T>* parts, T* out, int64_t num_parts, int64_t columns);

}  // namespace megatrain
