// Rows of a table by index, and the sum of gradients into those rows. An index of -1 has no row.
#pragma once

#include "elements.h"

namespace megatrain {

// out[row] = table[tokens[row]], or zeros. Only the size of an element matters, not its type.
struct LookUp {
  const int64_t* tokens;
  const void* table;  // [num_rows, columns]
  void* out;          // [num_tokens, columns]
  int64_t num_tokens, num_rows;
  int columns;
  int element_bytes;  // 2, 4 or 8
};

cudaError_t launch_look_up(cudaStream_t stream, const LookUp& p);

// How gradients are summed: tokens are sorted, so equal ones form a run. A part is PART_ROWS sorted tokens. A block sums
// the runs of one part, for some columns. A run within one part is added to the table at once. For a run over several
// parts, the sum of each part goes to `parts`, and sum_parts adds these afterwards, in the order of the parts. So a
// frequent token makes no block slower than the others, and each element of the table has one writer.
constexpr int PART_ROWS = 32;

template <typename T, typename W>
struct RowSums {
  const int32_t* sorted;  // tokens in ascending order
  const int64_t* order;   // the row of grad of each sorted token
  const T* grad;          // [num_tokens, columns]
  W* table;               // [num_rows, columns], added to
  wide_t<T>* parts;       // [number of parts, 2, columns]: sums of the runs from the previous and into the next part
  int64_t num_tokens, num_rows;
  int columns;
  int tiles;  // blocks side by side over the columns; the launch sets it
};

template <typename T, typename W>
cudaError_t launch_sum_rows(cudaStream_t stream, RowSums<T, W> p);
// For more than one part, after launch_sum_rows.
template <typename T, typename W>
cudaError_t launch_sum_parts(cudaStream_t stream, RowSums<T, W> p);

}  // namespace megatrain
