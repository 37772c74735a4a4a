/* The elementwise part of AdamW and LAMB over a flat shard on the CPU, in one pass.
 *
 * The results have the bits of megatrain/ops/optimizer_reference.py, for a shard that begins and ends anywhere: each
 * operation below is one of torch's there, in the same order and with the same rounding. Where torch's loops multiply
 * and add with one rounding, fma() is written out, and the compiler may not contract anything else
 * (-ffp-contract=off). Without fused instructions in the processor, fma() is a slow function of the C library.
 * This file uses neither torch nor Python.
 */
#include "host.h"
#include "argument.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The same as `_Step` in megatrain/ops/host_optimizer.py. */
typedef struct {
  void *grad; /* LAMB replaces it by the direction */
  void *master;
  void *exp_avg;
  void *exp_avg_sq;
  uint16_t *published;         /* bf16, or null */
  const int64_t *run_borders;  /* [num_runs + 1], ascending */
  const uint8_t *is_decayed;   /* [num_runs] */
  int64_t num_runs;
  int64_t num_elements;
  int32_t is_double;           /* else fp32 */
  int32_t has_bf16_grad;       /* else of the type of master; never with is_double */
  int32_t is_lamb;             /* else AdamW */
  int32_t num_threads;
  double gradient_scale;
  double new_share;            /* 1 - beta1 */
  double beta2;
  double new_square_share;     /* 1 - beta2 */
  double root_correction;      /* the root of the second moment's bias correction */
  double eps;
  double decay;                /* AdamW: the factor of decayed weights; LAMB: their factor in the direction */
  double correction;           /* AdamW: -lr / the first moment's bias correction; LAMB: that correction */
} Step;
ARGUMENT_OF(megatrain_optimizer_step, Step);

INLINE float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

INLINE uint16_t to_bf16(float value) { /* to the nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)(value != value ? 0x7fc0 : rounded);
}

#define AS_IT_IS(value) (value)
#define LOOP_NAME update_floats
#define LOOP_REAL float
#define LOOP_GRAD float
#define LOOP_READ AS_IT_IS
#define LOOP_FMA fmaf
#define LOOP_SQRT sqrtf
#include "optimizer_loop.h"

#define LOOP_NAME update_floats_with_bf16_grad
#define LOOP_REAL float
#define LOOP_GRAD uint16_t
#define LOOP_READ from_bf16
#define LOOP_FMA fmaf
#define LOOP_SQRT sqrtf
#include "optimizer_loop.h"

#define LOOP_NAME update_doubles
#define LOOP_REAL double
#define LOOP_GRAD double
#define LOOP_READ AS_IT_IS
#define LOOP_FMA fma
#define LOOP_SQRT sqrt
#include "optimizer_loop.h"

static void update_elements(const void *call, int64_t start, int64_t stop) {
  const Step *const step = call;
  void (*const update)(const Step *, int64_t, int64_t, int) = step->is_double       ? update_doubles
                                                              : step->has_bf16_grad ? update_floats_with_bf16_grad
                                                                                    : update_floats;
  int64_t done = start; /* padding, and elements outside of all runs, are not decayed */
  for (int64_t run = 0; run < step->num_runs; ++run) {
    if (!step->is_decayed[run]) continue;
    const int64_t from = clamped(step->run_borders[run], done, stop);
    const int64_t to = clamped(step->run_borders[run + 1], from, stop);
    update(step, done, from, 0);
    update(step, from, to, 1);
    done = to;
  }
  update(step, done, stop, 0);
}

void megatrain_optimizer_step(const Step *step) {
  run_in_parts(update_elements, step, step->num_elements, LINE_ELEMENTS, step->num_threads);
}
