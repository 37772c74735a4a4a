// Stands in for NVIDIA's header: half precision by the compiler's own type.
#pragma once

struct alignas(2) __half { _Float16 value; };

inline float __half2float(__half x) { return float(x.value); }
inline __half __float2half_rn(float value) { return {_Float16(value)}; }
