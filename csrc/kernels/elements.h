// The elements of tensors, for the host and for GPUs: the type in which kernels compute, and the packs in which they move.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

namespace megatrain {

// The type in which kernels compute: fp64 for fp64, and fp32 for all other storage types of tensors.
template <typename T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
template <typename T>
using wide_t = typename Wide<T>::type;

// A pack is the data that one thread moves at once: 16 bytes where addresses and lengths allow it, else one element.
constexpr int PACK_BYTES = 16;

// The elements of T in a pack of PACK_BYTES.
template <typename T>
constexpr int full_width = PACK_BYTES / sizeof(T);

inline bool is_aligned(const void* place) { return reinterpret_cast<std::uintptr_t>(place) % PACK_BYTES == 0; }

// The elements of a pack for rows of `length` elements of T at these places, of which some may be null.
template <typename T>
int pack_width(int64_t length, std::initializer_list<const void*> places) {
  bool is_full = length % full_width<T> == 0;
  for (const void* place : places) is_full = is_full && is_aligned(place);
  return is_full ? full_width<T> : 1;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace megatrain
