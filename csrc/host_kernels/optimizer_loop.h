/* One loop over elements. optimizer_step.c defines the types and includes this file, once for each combination. */

#define LOOP_PASTED(name, suffix) name##suffix
#define LOOP_NAMED(name, suffix) LOOP_PASTED(name, suffix)

/* Inlined with constants for the last three arguments, so that each loop has no branches. */
INLINE void LOOP_NAMED(LOOP_NAME, _loop)(
    const Step *step, int64_t start, int64_t stop, int is_decayed, int is_lamb, int is_published
) {
  LOOP_GRAD *const restrict grad = step->grad;
  LOOP_REAL *const restrict master = step->master;
  LOOP_REAL *const restrict exp_avg = step->exp_avg;
  LOOP_REAL *const restrict exp_avg_sq = step->exp_avg_sq;
  uint16_t *const restrict published = step->published;
  const LOOP_REAL scale = (LOOP_REAL)step->gradient_scale;
  const LOOP_REAL share = (LOOP_REAL)step->new_share;
  const LOOP_REAL beta2 = (LOOP_REAL)step->beta2;
  const LOOP_REAL square_share = (LOOP_REAL)step->new_square_share;
  const LOOP_REAL root_correction = (LOOP_REAL)step->root_correction;
  const LOOP_REAL eps = (LOOP_REAL)step->eps;
  const LOOP_REAL decay = (LOOP_REAL)step->decay;
  const LOOP_REAL correction = (LOOP_REAL)step->correction;
  const int is_small = share < (LOOP_REAL)0.5; /* torch's lerp begins at the nearer end */
  const LOOP_REAL from_end = is_small ? share : share - (LOOP_REAL)1;
  const int is_copied = step->new_share == 1;

  for (int64_t i = start; i < stop; ++i) {
    const LOOP_REAL scaled = LOOP_READ(grad[i]) * scale;
    const LOOP_REAL mixed = LOOP_FMA(from_end, scaled - exp_avg[i], is_small ? exp_avg[i] : scaled);
    const LOOP_REAL first = is_copied ? scaled : mixed;
    const LOOP_REAL second = LOOP_FMA(square_share * scaled, scaled, exp_avg_sq[i] * beta2);
    const LOOP_REAL denominator = LOOP_SQRT(second) / root_correction + eps;
    exp_avg[i] = first;
    exp_avg_sq[i] = second;
    if (is_lamb) {
      const LOOP_REAL direction = first / correction / denominator;
      grad[i] = (LOOP_GRAD)(is_decayed ? LOOP_FMA(decay, master[i], direction) : direction);
    } else {
      const LOOP_REAL kept = is_decayed ? master[i] * decay : master[i];
      const LOOP_REAL moved = kept + correction * first / denominator;
      master[i] = moved;
      if (is_published) published[i] = to_bf16((float)moved);
    }
  }
}

INLINE void LOOP_NAMED(LOOP_NAME, _any)(const Step *step, int64_t start, int64_t stop, int is_decayed) {
  if (step->is_lamb) {
    if (is_decayed)
      LOOP_NAMED(LOOP_NAME, _loop)(step, start, stop, 1, 1, 0);
    else
      LOOP_NAMED(LOOP_NAME, _loop)(step, start, stop, 0, 1, 0);
  } else if (step->published) {
    if (is_decayed)
      LOOP_NAMED(LOOP_NAME, _loop)(step, start, stop, 1, 0, 1);
    else
      LOOP_NAMED(LOOP_NAME, _loop)(step, start, stop, 0, 0, 1);
  } else if (is_decayed) {
    LOOP_NAMED(LOOP_NAME, _loop)(step, start, stop, 1, 0, 0);
  } else {
    LOOP_NAMED(LOOP_NAME, _loop)(step, start, stop, 0, 0, 0);
  }
}

COMPILE_TWICE(
    LOOP_NAME, (const Step *step, int64_t start, int64_t stop, int is_decayed), (step, start, stop, is_decayed)
)

#undef LOOP_NAMED
#undef LOOP_PASTED
#undef LOOP_NAME
#undef LOOP_REAL
#undef LOOP_GRAD
#undef LOOP_READ
#undef LOOP_FMA
#undef LOOP_SQRT
