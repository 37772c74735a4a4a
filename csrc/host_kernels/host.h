/* The choice of the processor's instructions, vectors, and threads, for all kernels. Include it before other headers. */
#ifndef MEGATRAIN_HOST_H
#define MEGATRAIN_HOST_H

#define _GNU_SOURCE /* for RTLD_DEFAULT */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* LINE_ELEMENTS: elements of whole cache lines, so that no two threads write to the same line */
enum { MIN_ELEMENTS_OF_THREAD = 1 << 15, MAX_THREADS = 256, LINE_ELEMENTS = 64 };

/* On x86-64, each loop is compiled twice: for every processor, and for those with AVX2 and fused instructions. */
#ifdef __x86_64__
#define FOR_AVX2 __attribute__((target("avx2,fma")))
static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define FOR_AVX2
static int has_avx2(void) { return 0; }
#endif
#define INLINE static inline __attribute__((always_inline))

/* Defines the function `name`, which runs `name_any`, an INLINE function, as compiled for this processor. */
#define COMPILE_TWICE(name, parameters, arguments) COMPILE_EXPANDED(name, parameters, arguments)
#define COMPILE_EXPANDED(name, parameters, arguments)                   \
  FOR_AVX2 static void name##_avx2 parameters { name##_any arguments; } \
  static void name parameters {                                         \
    if (has_avx2())                                                     \
      name##_avx2 arguments;                                            \
    else                                                                \
      name##_any arguments;                                             \
  }

/* Floats that are computed together. Processors without vectors of this length compute the same numbers in parts. */
enum { LANES = 8 };

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

INLINE Lanes load(const float *from) {
  Lanes lanes;
  memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

INLINE void store(float *to, Lanes lanes) { memcpy(to, &lanes, sizeof lanes); }

static int64_t clamped(int64_t value, int64_t least, int64_t most) {
  return value < least ? least : value > most ? most : value;
}

/* Work on the elements [start, stop) of a call. */
typedef void (*Work)(const void *call, int64_t start, int64_t stop);

typedef struct {
  Work work;
  const void *call;
  int64_t num_elements, size; /* size: of a part */
  int64_t num_parts;
  atomic_llong next; /* the first part that no thread has taken */
} Parts;

static void *run_parts(void *argument) {
  Parts *const parts = argument;
  for (int64_t number; (number = atomic_fetch_add(&parts->next, 1)) < parts->num_parts;) {
    const int64_t start = clamped(number * parts->size, 0, parts->num_elements);
    parts->work(parts->call, start, clamped(start + parts->size, start, parts->num_elements));
  }
  return NULL;
}

static void join_in(void *argument) { run_parts(argument); }

/* The OpenMP runtime that this process has loaded, which is torch's: its threads exist and wait already. The number of
 * threads stays that of torch (0): a smaller team would end threads, which torch's next operation would start again. */
typedef void (*Parallel)(void (*function)(void *), void *argument, unsigned num_threads, unsigned flags);

static void start_threads(Parts *parts) {
  pthread_t threads[MAX_THREADS];
  int64_t num_started = 1;
  /* threads inherit the rounding and the treatment of denormals */
  while (num_started < parts->num_parts && !pthread_create(&threads[num_started], NULL, run_parts, parts)) ++num_started;
  run_parts(parts);
  for (int64_t number = 1; number < num_started; ++number) pthread_join(threads[number], NULL);
}

/* Run `work` on all elements, in at most `num_threads` threads. All parts begin at a multiple of `granule` elements. */
static void run_in_parts(Work work, const void *call, int64_t num_elements, int64_t granule, int64_t num_threads) {
  const int64_t most = clamped(num_threads, 1, MAX_THREADS);
  const int64_t num_parts = clamped(num_elements / MIN_ELEMENTS_OF_THREAD, 1, most);
  const int64_t least = (num_elements + num_parts - 1) / num_parts;
  const int64_t size = (least + granule - 1) / granule * granule;
  Parts parts = {.work = work, .call = call, .num_elements = num_elements, .size = size, .num_parts = num_parts};
  const Parallel parallel = num_parts > 1 ? (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel") : NULL;
  if (num_parts == 1)
    run_parts(&parts);
  else if (parallel)
    parallel(join_in, &parts, 0, 0);
  else
    start_threads(&parts);
}

#endif
