/* RMSNorm in fp32 on the CPU, with or without the addition before it: forward and backward in one pass each.
 *
 * A row is computed by the same operations wherever it lies and whatever the processor: its sums have a fixed order,
 * and the compiler may not contract anything (-ffp-contract=off). Rows stay in the processor's cache between the loop
 * that sums them and the one that uses the sum.
 * This file uses neither torch nor Python.
 */
#include "host.h"
#include "argument.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The same as `_RmsNormCall` in megatrain/ops/host_rms_norm.py. Matrices are [num_rows, num_columns]. */
typedef struct {
  const float *x;
  const float *added;    /* forward: added to x; backward: to its gradient; or null */
  const float *weight;   /* [num_columns] */
  const float *grad;     /* the gradient of the result, or null for forward */
  float *rstd;           /* [num_rows]; forward writes it, backward reads it */
  float *total;          /* forward: x + added, or null without `added` */
  float *out;            /* forward: the result; backward: the gradient of x */
  float *grad_weight;    /* backward: [blocks of rows, num_columns], which are to be added; or null */
  int64_t num_rows;
  int64_t num_columns;
  int64_t num_threads;
  float eps;
} RmsNorm;
ARGUMENT_OF(megatrain_rms_norm, RmsNorm);

/* Rows whose gradients of the weight are added one after another; the same in host_rms_norm.py. */
enum { BLOCK_ROWS = 16 };

/* The partial sums of a row: two vectors, so that an addition need not wait for the one before. */
enum { SUMS = 2, STEP = SUMS * LANES };

INLINE float sum_of(const Lanes lanes[SUMS], const float last[STEP]) {
  float sums[STEP];
  for (int part = 0; part < SUMS; ++part) store(sums + part * LANES, lanes[part] + load(last + part * LANES));
  for (int width = STEP / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return sums[0];
}

INLINE void normalize_row(const RmsNorm *call, int64_t row, int has_added) {
  const int64_t columns = call->num_columns, whole = columns / STEP * STEP;
  const float *const restrict x = call->x + row * columns;
  const float *const restrict added = has_added ? call->added + row * columns : NULL;
  const float *const restrict weight = call->weight;
  float *const restrict total = has_added ? call->total + row * columns : NULL;
  float *const restrict out = call->out + row * columns;
  Lanes squares[SUMS] = {{0}};
  float last[STEP] = {0};
  for (int64_t i = 0; i < whole; i += STEP)
    for (int part = 0; part < SUMS; ++part) {
      const int64_t at = i + part * LANES;
      Lanes value = load(x + at);
      if (has_added) store(total + at, value = value + load(added + at));
      squares[part] += value * value;
    }
  for (int64_t i = whole; i < columns; ++i) {
    const float value = has_added ? x[i] + added[i] : x[i];
    if (has_added) total[i] = value;
    last[i - whole] = value * value;
  }
  const float rstd = 1.0f / sqrtf(sum_of(squares, last) / (float)columns + call->eps);
  call->rstd[row] = rstd;
  const float *const summed = has_added ? total : x;
  for (int64_t i = 0; i < columns; ++i) out[i] = summed[i] * rstd * weight[i];
}

INLINE void differentiate_row(const RmsNorm *call, int64_t row, float *restrict grad_weight, int has_added) {
  const int64_t columns = call->num_columns, whole = columns / STEP * STEP;
  const float *const restrict x = call->x + row * columns;
  const float *const restrict grad = call->grad + row * columns;
  const float *const restrict added = has_added ? call->added + row * columns : NULL;
  const float *const restrict weight = call->weight;
  float *const restrict out = call->out + row * columns;
  const float rstd = call->rstd[row];
  Lanes products[SUMS] = {{0}};
  float last[STEP] = {0};
  for (int64_t i = 0; i < whole; i += STEP)
    for (int part = 0; part < SUMS; ++part) {
      const int64_t at = i + part * LANES;
      const Lanes normed = load(x + at) * rstd, of_result = load(grad + at);
      store(grad_weight + at, load(grad_weight + at) + of_result * normed);
      products[part] += of_result * load(weight + at) * normed;
    }
  for (int64_t i = whole; i < columns; ++i) {
    const float normed = x[i] * rstd;
    grad_weight[i] += grad[i] * normed;
    last[i - whole] = grad[i] * weight[i] * normed;
  }
  const float projection = sum_of(products, last) / (float)columns;
  for (int64_t i = 0; i < columns; ++i) {
    const float grad_x = (grad[i] * weight[i] - x[i] * rstd * projection) * rstd;
    out[i] = has_added ? grad_x + added[i] : grad_x;
  }
}

/* Parts begin at whole blocks of rows. Inlined with constants for the last two arguments. */
INLINE void compute_rows(const RmsNorm *call, int64_t row, int64_t stop, int is_backward, int has_added) {
  for (; row < stop; ++row) {
    if (!is_backward) {
      normalize_row(call, row, has_added);
      continue;
    }
    float *const grad_weight = call->grad_weight + row / BLOCK_ROWS * call->num_columns;
    if (row % BLOCK_ROWS == 0) memset(grad_weight, 0, (size_t)call->num_columns * sizeof *grad_weight);
    differentiate_row(call, row, grad_weight, has_added);
  }
}

INLINE void compute_any(const RmsNorm *call, int64_t start, int64_t stop) {
  const int64_t row = start / call->num_columns, end = stop / call->num_columns;
  if (call->grad && call->added)
    compute_rows(call, row, end, 1, 1);
  else if (call->grad)
    compute_rows(call, row, end, 1, 0);
  else if (call->added)
    compute_rows(call, row, end, 0, 1);
  else
    compute_rows(call, row, end, 0, 0);
}

COMPILE_TWICE(compute, (const void *call, int64_t start, int64_t stop), (call, start, stop))

void megatrain_rms_norm(const RmsNorm *call) {
  const int64_t num_elements = call->num_rows * call->num_columns;
  run_in_parts(compute, call, num_elements, BLOCK_ROWS * call->num_columns, call->num_threads);
}
