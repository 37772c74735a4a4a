// Shared by the operators that use kernels/columns.h: the shape of a walk down columns, and the second half of sums.
#pragma once

#include <algorithm>

#include "../kernels/columns.h"
#include "torch_side.h"

namespace megatrain {

constexpr int WALK_SUM_ROUNDS = 4;  // least rounds of a group with sums, so that the sums need far less memory than the rows

// rows_at_once: the rows that a thread handles at once. has_sums: the groups of threads write sums of their columns. Then
// only as many blocks are launched as run at once, and each loops over rows. Otherwise a thread handles its rows and ends,
// so that the hardware balances the load.
inline WalkShape walk_shape(const Device& device, int64_t rows, int64_t columns, int width, int rows_at_once, bool has_sums) {
  const int64_t pieces = divide_up(columns, width);
  const int threads = int(pieces < WALK_THREADS ? divide_up(pieces, 32) * 32 : WALK_THREADS);
  const int height = WALK_THREADS / threads;
  const int64_t tiles = divide_up(pieces, threads);
  int64_t bands = divide_up(rows, height * rows_at_once);
  if (has_sums) {
    const int64_t resident = device.num_multiprocessors() * WALK_MIN_BLOCKS / tiles;
    const int64_t useful = divide_up(rows, height * rows_at_once * WALK_SUM_ROUNDS);
    bands = std::max<int64_t>(1, std::min(useful, resident));
  }
  require(bands * tiles <= 0x7fffffff, "a tensor of ", rows, " rows of ", columns, " elements is too large for one launch");
  return {{rows, columns, int(tiles)}, width, bands * tiles, dim3(threads, height)};
}

// out = sum of parts [groups, columns] over the groups; out has `columns` elements in any shape.
template <typename T>
void sum_columns(const Device& device, const Tensor& parts, const Tensor& out) {
  const int64_t columns = parts.size(1);
  if (columns == 0) return;
  check_cuda("column_sum", launch_column_sum<T>(device.stream(), const_pointer<wide_t<T>>(parts), pointer<T>(out), parts.size(0),
                                                columns));
}

}  // namespace megatrain
