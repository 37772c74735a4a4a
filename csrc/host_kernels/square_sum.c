/* The sum of the squares of fp32 numbers on the CPU, added in fp64.
 *
 * The order of additions depends only on the number of elements: 16 partial sums of each block, then the blocks one
 * after another. This file uses neither torch nor Python.
 */
#include "host.h"
#include "argument.h"

#include <stdint.h>
#include <string.h>

/* The same as `_SquareSum` in megatrain/ops/square_sums.py. */
typedef struct {
  const float *x;
  double *block_sums; /* [blocks of BLOCK_ELEMENTS] */
  double *sum;        /* one number, which is written */
  int64_t num_elements;
  int64_t num_threads;
} SquareSum;
ARGUMENT_OF(megatrain_square_sum, SquareSum);

enum { BLOCK_ELEMENTS = 1 << 16, WIDTH = 4, SUMS = 4, STEP = SUMS * WIDTH };

typedef float Narrow __attribute__((vector_size(WIDTH * sizeof(float))));
typedef double Wide __attribute__((vector_size(WIDTH * sizeof(double))));

INLINE double block_sum(const float *x, int64_t count) {
  Wide sums[SUMS] = {{0}};
  int64_t i = 0;
  for (; i + STEP <= count; i += STEP)
    for (int part = 0; part < SUMS; ++part) {
      Narrow narrow;
      memcpy(&narrow, x + i + part * WIDTH, sizeof narrow);
      const Wide wide = __builtin_convertvector(narrow, Wide);
      sums[part] += wide * wide;
    }
  const Wide all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double sum = (all[0] + all[1]) + (all[2] + all[3]);
  for (; i < count; ++i) sum += (double)x[i] * (double)x[i];
  return sum;
}

/* Parts begin at whole blocks. */
INLINE void compute_any(const SquareSum *call, int64_t start, int64_t stop) {
  for (; start < stop; start += BLOCK_ELEMENTS)
    call->block_sums[start / BLOCK_ELEMENTS] = block_sum(call->x + start, clamped(stop - start, 0, BLOCK_ELEMENTS));
}

COMPILE_TWICE(compute, (const void *call, int64_t start, int64_t stop), (call, start, stop))

void megatrain_square_sum(const SquareSum *call) {
  run_in_parts(compute, call, call->num_elements, BLOCK_ELEMENTS, call->num_threads);
  double sum = 0;
  for (int64_t start = 0; start < call->num_elements; start += BLOCK_ELEMENTS)
    sum += call->block_sums[start / BLOCK_ELEMENTS];
  *call->sum = sum;
}
