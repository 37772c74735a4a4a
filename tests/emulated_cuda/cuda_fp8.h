// Stands in for NVIDIA's header: fp32 to 8-bit formats, rounded to nearest even, saturated to the largest finite number.
#pragma once

#include <cmath>

struct alignas(8) float2 { float x, y; };

using __nv_fp8_storage_t = unsigned char;
using __nv_fp8x2_storage_t = unsigned short;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t, __nv_fp8_interpretation_t format) {
  const int mantissa_bits = format == __NV_E4M3 ? 3 : 2;
  const int bias = format == __NV_E4M3 ? 7 : 15;
  const float largest = format == __NV_E4M3 ? 448.0f : 57344.0f;
  const unsigned char sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7f;
  float size = std::fabs(value);
  if (size > largest) size = largest;
  int exponent = size == 0.0f ? -bias : std::ilogb(size);
  if (exponent < 1 - bias) exponent = 1 - bias;  // subnormal numbers share the smallest exponent
  // in units of the last mantissa bit; may round up into the next exponent, which the encoding carries by itself
  const int units = int(std::nearbyint(std::ldexp(size, mantissa_bits - exponent)));
  const int code = units < (1 << mantissa_bits) ? units : ((exponent + bias - 1) << mantissa_bits) + units;
  return sign | static_cast<unsigned char>(code);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 pair, __nv_saturation_t saturation,
                                                    __nv_fp8_interpretation_t format) {
  return static_cast<__nv_fp8x2_storage_t>(__nv_cvt_float_to_fp8(pair.x, saturation, format) |
                                           __nv_cvt_float_to_fp8(pair.y, saturation, format) << 8);
}
