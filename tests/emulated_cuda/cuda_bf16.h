// Stands in for NVIDIA's header: bfloat16 as 16 bits, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct alignas(2) __nv_bfloat16 { std::uint16_t bits; };

inline float __bfloat162float(__nv_bfloat16 x) {
  std::uint32_t wide = std::uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  std::uint32_t wide;
  std::memcpy(&wide, &value, 4);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return {std::uint16_t(0x7fff)};
  return {std::uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}
