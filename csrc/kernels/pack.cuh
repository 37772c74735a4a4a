// A pack is the data that one thread moves at once: 16 bytes where addresses and lengths allow it, else one element.
#pragma once

#include <cstdint>

#include "precision.cuh"

namespace megatrain {

constexpr int PACK_BYTES = 16;

template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Pack {
  T lane[WIDTH];

  __device__ __forceinline__ static Pack load(const T* place) { return *reinterpret_cast<const Pack*>(place); }
  __device__ __forceinline__ void store(T* place) const { *reinterpret_cast<Pack*>(place) = *this; }
};

// The widest pack for rows of `length` elements that all begin at multiples of it.
template <typename T>
constexpr int full_width = PACK_BYTES / sizeof(T);

inline bool is_aligned(const void* place) { return reinterpret_cast<std::uintptr_t>(place) % PACK_BYTES == 0; }

}  // namespace megatrain
