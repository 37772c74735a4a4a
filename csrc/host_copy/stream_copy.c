/* Copy memory without filling the processor's caches, several pages at a time.
 *
 * The stores of an ordinary copy first read the cache lines that they overwrite, and evict lines that are still needed.
 * A snapshot is gigabytes that are not read again soon, so both are wasted work. The processor prefetches only within a
 * page, so one stream of addresses keeps too few reads in flight; four streams keep enough. libc copies in this way
 * too, but only above a size that depends on the machine's cache and is larger than most tensors. Every x86-64 has
 * SSE2.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)

#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, NUM_PAGES = 4 };

static void stream_line(char *target, const char *source) {
  const __m128i a = _mm_loadu_si128((const __m128i *)source);
  const __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
  const __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
  const __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
  _mm_stream_si128((__m128i *)target, a);
  _mm_stream_si128((__m128i *)(target + 16), b);
  _mm_stream_si128((__m128i *)(target + 32), c);
  _mm_stream_si128((__m128i *)(target + 48), d);
}

static void stream_pages(char *target, const char *source) {
  for (size_t at = 0; at < PAGE; at += LINE)
    for (size_t page = 0; page < NUM_PAGES; ++page)
      stream_line(target + page * PAGE + at, source + page * PAGE + at);
}

void megatrain_stream_copy(void *target, const void *source, size_t num_bytes) {
  char *to = target;
  const char *from = source;
  size_t head = (size_t)(-(uintptr_t)to % PAGE);
  if (head > num_bytes) head = num_bytes;
  memcpy(to, from, head);
  size_t done = head;
  for (; num_bytes - done >= NUM_PAGES * PAGE; done += NUM_PAGES * PAGE) stream_pages(to + done, from + done);
  _mm_sfence(); /* makes the stores visible before any later store that announces them */
  memcpy(to + done, from + done, num_bytes - done);
}

#else

void megatrain_stream_copy(void *target, const void *source, size_t num_bytes) { memcpy(target, source, num_bytes); }

#endif
