// Launches the second half of sums down the columns (kernels/column_sum.cuh).
#pragma once

#include "../kernels/column_sum.cuh"
#include "torch_side.h"

namespace megatrain {

// out = sum of parts [groups, columns] over the groups; out has `columns` elements in any shape.
template <typename T>
void launch_column_sum(const Device& device, const Tensor& parts, const Tensor& out) {
  const int64_t columns = parts.size(1);
  if (columns == 0) return;
  device.launch("column_sum", column_sum<T>, dim3(divide_up(columns, COLUMN_SUM_WIDTH)),
                dim3(COLUMN_SUM_WIDTH, COLUMN_SUM_HEIGHT), const_pointer<wide_t<T>>(parts), pointer<T>(out), parts.size(0), columns);
}

}  // namespace megatrain
