// Rotary positions: heads are read, rotated (queries and keys) or not (values), and written to their target, which may be
// the same place. Half-split convention: unit d is paired with unit d + half.
#pragma once

#include "elements.h"

namespace megatrain {

// Heads [S, B, G, heads of a group, D], with contiguous units. Strides in elements.
template <typename T>
struct HeadsFrom {
  const T* place;
  int64_t sequence, batch, group, head;
};
template <typename T>
struct HeadsTo {
  T* place;
  int64_t sequence, batch, group, head;
};

template <typename T>
struct Rotary {
  HeadsFrom<T> from[3];  // queries, keys, values; zeros where values are not moved
  HeadsTo<T> to[3];
  const wide_t<T>* cos;  // [S, half]
  const wide_t<T>* sin;
  int tokens, batch;
  int heads;    // of a token
  int a_group;  // heads of a group: queries, then a key, then a value where values are moved too
  int queries;  // in a group
  int half;
  bool is_inverse;
};

template <typename T>
cudaError_t launch_rotary(cudaStream_t stream, const Rotary<T>& p);

}  // namespace megatrain
