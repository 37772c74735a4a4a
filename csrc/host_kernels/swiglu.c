/* The gradient of SwiGLU without a bias in fp32 on the CPU, in one pass.
 *
 * Each element is computed from its own inputs by the same operations, wherever it lies and whatever the processor:
 * fma() is written out, and the compiler may not contract anything else (-ffp-contract=off). The exponential function
 * is written here because those of C libraries and of torch differ in their last bits.
 * This file uses neither torch nor Python.
 */
#include "host.h"
#include "argument.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The same as `_Swiglu` in megatrain/ops/host_swiglu.py. */
typedef struct {
  const float *x;    /* [num_rows, 2, num_columns], gate then up */
  const float *grad; /* [num_rows, num_columns]: the gradient of the result */
  float *out;        /* the gradient of x, in its shape */
  int64_t num_rows;
  int64_t num_columns;
  int64_t num_threads;
} Swiglu;
ARGUMENT_OF(megatrain_swiglu_backward, Swiglu);

/* The power of two, for exponents of normal numbers. */
INLINE float power_of_two(int32_t exponent) {
  const uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* e^x = 2^n * e^r, where n is an integer and |r| <= log(2) / 2. The relative error of e^r's series is at most 7.3e-9. */
INLINE float exponential(float x) {
  const float most = 104.0f; /* e^104 is infinite in fp32, and e^-104 is 0 */
  const float bounded = x > most ? most : x < -most ? -most : x; /* NaN stays NaN */
  const float integers = 0x1.8p23f; /* a sum with this number is rounded to an integer, which its lowest bits hold */
  const float shifted = fmaf(bounded, 0x1.715476p0f, integers);
  const float n = shifted - integers;
  const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, bounded)); /* log(2) in two parts */
  float sum = 1.0f / 5040;
  sum = fmaf(sum, r, 1.0f / 720);
  sum = fmaf(sum, r, 1.0f / 120);
  sum = fmaf(sum, r, 1.0f / 24);
  sum = fmaf(sum, r, 1.0f / 6);
  sum = fmaf(sum, r, 0.5f);
  sum = fmaf(sum, r, 1.0f);
  sum = fmaf(sum, r, 1.0f);
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  const int32_t exponent = (int32_t)(bits - 0x4b400000u);
  const int32_t half = exponent >> 1; /* in two steps, because 2^n itself may be no normal number */
  return sum * power_of_two(half) * power_of_two(exponent - half);
}

INLINE void differentiate(
    const float *restrict gate,
    const float *restrict up,
    const float *restrict grad,
    float *restrict grad_gate,
    float *restrict grad_up,
    int64_t count
) {
  for (int64_t i = 0; i < count; ++i) {
    const float share = 1.0f / (1.0f + exponential(-gate[i]));
    grad_up[i] = grad[i] * (gate[i] * share);
    grad_gate[i] = grad[i] * share * fmaf(gate[i], 1.0f - share, 1.0f) * up[i];
  }
}

INLINE void compute_any(const Swiglu *call, int64_t start, int64_t stop) {
  const int64_t columns = call->num_columns;
  int64_t count;
  for (int64_t at = start; at < stop; at += count) {
    const int64_t row = at / columns, column = at % columns;
    count = clamped(columns - column, 0, stop - at);
    const int64_t gate = row * 2 * columns + column, up = gate + columns;
    differentiate(call->x + gate, call->x + up, call->grad + at, call->out + gate, call->out + up, count);
  }
}

COMPILE_TWICE(compute, (const void *call, int64_t start, int64_t stop), (call, start, stop))

void megatrain_swiglu_backward(const Swiglu *call) {
  run_in_parts(compute, call, call->num_rows * call->num_columns, LINE_ELEMENTS, call->num_threads);
}

/* Writes 1 if fma() is an instruction of this processor, else 0. If it is a function, torch's operations are much faster
 * than this kernel. */
void megatrain_has_fused_instructions(int64_t *found) {
#ifdef __FP_FAST_FMAF
  *found = 1;
#else
  *found = has_avx2();
#endif
}
