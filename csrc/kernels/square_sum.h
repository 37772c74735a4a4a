// The sum of all squares of a flat tensor in fp64. Squares of fp32 are exact in fp64, and their sum does not overflow.
#pragma once

#include "elements.h"

namespace megatrain {

constexpr int SQUARE_SUM_TILE = 8192;  // elements of a block; fixed, so that the sum is the same for any number of SMs

// parts[tile] = sum of the squares of one tile.
template <typename T>
cudaError_t launch_square_sum_parts(cudaStream_t stream, const T* flat, double* parts, int64_t count);
// total = sum of the parts.
cudaError_t launch_add_parts(cudaStream_t stream, const double* parts, double* total, int64_t num_parts);

}  // namespace megatrain
