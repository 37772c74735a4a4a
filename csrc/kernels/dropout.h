// Dropout with counter-based random numbers (bitwise those of megatrain/rng.py), with bias before and residual after it.
#pragma once

#include "columns.h"

namespace megatrain {

struct DropoutKey {
  uint64_t first, second;
};

// out = residual + kept * (y + bias) * scale. All terms except y may be missing.
template <typename T>
struct Dropout {
  const T* y;
  const T* residual;
  const T* bias;         // [columns]
  const int64_t* token;  // one number for each row, from which its mask is drawn; null: all is kept
  T* out;
  wide_t<T>* parts;  // [groups of threads, columns]: sums over rows of the result before it is rounded
  ColumnWalk walk;
  DropoutKey key;
  uint64_t threshold;  // an element is dropped when the upper half of its 64 bits is below it
  wide_t<T> scale;
};

template <typename T>
cudaError_t launch_dropout(cudaStream_t stream, const Dropout<T>& p, const WalkShape& shape);

}  // namespace megatrain
