/* Rotates queries and keys by the angles of their positions in fp32 on the CPU, in one pass.
 *
 * The results have the bits of the reference in megatrain/ops/rotary_reference.py: each product and each sum is rounded
 * (-ffp-contract=off). Source and target may be the same memory.
 * This file uses neither torch nor Python.
 */
#include "host.h"
#include "argument.h"

#include <stdint.h>
#include <string.h>

/* Some heads of each token and group: where they are read and written. Strides are in elements. */
typedef struct {
  const float *source;
  float *target;
  int64_t source_strides[4]; /* of position, sample, group, head */
  int64_t target_strides[4];
  int64_t num_heads;
  int64_t is_rotated; /* else copied */
} Heads;

/* The same as `_Rotation` in megatrain/ops/host_rotary.py. */
typedef struct {
  Heads heads[3];
  int64_t num_kinds; /* of heads */
  const float *cos;  /* [num_positions, num_units / 2] */
  const float *sin;
  int64_t num_positions;
  int64_t num_samples;
  int64_t num_groups;
  int64_t num_units; /* of a head */
  int64_t num_threads;
  float sign; /* of the angles */
} Rotation;
ARGUMENT_OF(megatrain_rotate, Rotation);

INLINE void rotate(const float *source, float *target, const float *cos, const float *sin, float sign, int64_t half) {
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Lanes first = load(source + i), second = load(source + half + i);
    const Lanes cosine = load(cos + i), sine = load(sin + i) * sign;
    store(target + i, first * cosine - second * sine);
    store(target + half + i, second * cosine + first * sine);
  }
  for (; i < half; ++i) {
    const float first = source[i], second = source[half + i], sine = sin[i] * sign;
    target[i] = first * cos[i] - second * sine;
    target[half + i] = second * cos[i] + first * sine;
  }
}

INLINE int64_t offset(const int64_t strides[4], int64_t position, int64_t sample, int64_t group) {
  return position * strides[0] + sample * strides[1] + group * strides[2];
}

INLINE void turn_heads(const Rotation *call, const Heads *heads, int64_t position, int64_t sample, int64_t group) {
  const int64_t units = call->num_units, half = units / 2;
  const float *const source = heads->source + offset(heads->source_strides, position, sample, group);
  float *const target = heads->target + offset(heads->target_strides, position, sample, group);
  for (int64_t head = 0; head < heads->num_heads; ++head) {
    const float *const from = source + head * heads->source_strides[3];
    float *const to = target + head * heads->target_strides[3];
    if (heads->is_rotated)
      rotate(from, to, call->cos + position * half, call->sin + position * half, call->sign, half);
    else
      memcpy(to, from, (size_t)units * sizeof *to);
  }
}

static int64_t elements_of_token(const Rotation *call) {
  int64_t num_heads = 0;
  for (int64_t kind = 0; kind < call->num_kinds; ++kind) num_heads += call->heads[kind].num_heads;
  return call->num_groups * num_heads * call->num_units;
}

/* Parts begin at whole tokens. */
INLINE void compute_any(const Rotation *call, int64_t start, int64_t stop) {
  const int64_t of_token = elements_of_token(call), end = stop / of_token;
  for (int64_t token = start / of_token; token < end; ++token)
    for (int64_t group = 0; group < call->num_groups; ++group)
      for (int64_t kind = 0; kind < call->num_kinds; ++kind)
        turn_heads(call, &call->heads[kind], token / call->num_samples, token % call->num_samples, group);
}

COMPILE_TWICE(compute, (const void *call, int64_t start, int64_t stop), (call, start, stop))

void megatrain_rotate(const Rotation *call) {
  const int64_t of_token = elements_of_token(call);
  run_in_parts(compute, call, call->num_positions * call->num_samples * of_token, of_token, call->num_threads);
}
