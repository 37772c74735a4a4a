// Carries out a grid of threads on one thread of the processor (see cuda_runtime.h).
#include "cuda_runtime.h"

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
namespace {

constexpr std::size_t STACK_BYTES = 128 << 10;
constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;

struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Warp {
  Barrier barrier;
  std::uint64_t values[WARP];
};

// Once started, a fiber lives on and carries out the thread of its number in every later block.
struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  dim3 index;
  bool is_started, is_done;
};

Fiber fibers[MAX_THREADS];
unsigned num_threads = 0;
std::vector<Warp> warps;
char* stacks = nullptr;
Barrier block;
jmp_buf scheduler;
unsigned current = 0;
bool has_progress = false;
unsigned order_seed = 0;
unsigned long long num_launches = 0;
const std::function<void()>* body = nullptr;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulated CUDA: %s (block %u %u %u of grid %u %u %u, thread %u of %u)\n", what, blockIdx.x, blockIdx.y,
               blockIdx.z, gridDim.x, gridDim.y, gridDim.z, current, num_threads);
  std::abort();
}

void pause() {
  if (_setjmp(fibers[current].resume) == 0) _longjmp(scheduler, 1);
}

void wait(Barrier& barrier) {
  unsigned generation = barrier.generation;
  has_progress = true;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) pause();
}

void run_fiber() {
  for (;;) {
    (*body)();
    fibers[current].is_done = true;
    has_progress = true;
    pause();
  }
}

void resume(unsigned number) {
  Fiber& fiber = fibers[number];
  current = number;
  threadIdx = fiber.index;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.is_started) _longjmp(fiber.resume, 1);
  fiber.is_started = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stacks + number * STACK_BYTES;
  fiber.start.uc_stack.ss_size = STACK_BYTES;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, run_fiber, 0);
  setcontext(&fiber.start);
}

void reserve_stacks() {
  if (stacks != nullptr) return;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for the stacks of a block");
  stacks = static_cast<char*>(memory);
}

void start_block(unsigned count) {
  for (unsigned number = 0; number < count; ++number) {
    fibers[number].is_done = false;
    fibers[number].index = dim3(number % blockDim.x, number / blockDim.x % blockDim.y, number / (blockDim.x * blockDim.y));
  }
  block = Barrier{count, 0, 0};
  for (unsigned number = 0; number < warps.size(); ++number) {
    warps[number].barrier = Barrier{count - number * WARP < WARP ? count - number * WARP : WARP, 0, 0};
  }
}

// One warp after the other runs as far as it can without the rest: only barriers keep it from overtaking them.
void run_block(unsigned count, std::vector<unsigned>& order, std::mt19937& random) {
  start_block(count);
  std::vector<std::vector<unsigned>> lanes(warps.size());
  for (unsigned number : order) lanes[number / WARP].push_back(number);
  std::vector<unsigned> warp_order;
  for (unsigned number : order) {
    if (lanes[number / WARP].front() == number) warp_order.push_back(number / WARP);
  }
  unsigned num_done = 0;
  while (num_done < count) {
    bool has_any_progress = false;
    for (unsigned warp : warp_order) {
      do {
        has_progress = false;
        for (unsigned number : lanes[warp]) {
          if (fibers[number].is_done) continue;
          resume(number);
          num_done += fibers[number].is_done;
        }
        has_any_progress = has_any_progress || has_progress;
      } while (has_progress);
    }
    if (!has_any_progress) fail("a barrier or shuffle waits for threads that do not come");
    if (order_seed > 1) std::shuffle(warp_order.begin(), warp_order.end(), random);
  }
  if (block.arrived != 0) fail("a thread ended while others wait at a barrier");
}

}  // namespace

unsigned lane() { return current % WARP; }

void block_barrier() { wait(block); }

void warp_barrier(unsigned mask) {
  Warp& warp = warps[current / WARP];
  if (unsigned(__builtin_popcount(mask)) != warp.barrier.expected) fail("a mask that is not the whole warp");
  wait(warp.barrier);
}

std::uint64_t exchange(unsigned mask, std::uint64_t value, unsigned lane) {
  Warp& warp = warps[current / WARP];
  if (lane >= warp.barrier.expected) fail("a shuffle from a lane that the block does not have");
  warp.values[current % WARP] = value;
  warp_barrier(mask);
  std::uint64_t result = warp.values[lane];
  warp_barrier(mask);
  return result;
}

void run_grid(dim3 grid, dim3 shape, const std::function<void()>& thread) {
  unsigned count = shape.x * shape.y * shape.z;
  if (count == 0 || count > MAX_THREADS) fail("a block of more than 1024 threads, or of none");
  if (shape.z > 64) fail("a block of more than 64 threads along z");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    fail("a grid that no device launches");
  }
  ++num_launches;
  gridDim = grid;
  blockDim = shape;
  body = &thread;
  reserve_stacks();
  num_threads = count;
  warps.resize((count + WARP - 1) / WARP);
  std::mt19937 random(order_seed);
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (order_seed == 1) std::reverse(order.begin(), order.end());
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        if (order_seed > 1) std::shuffle(order.begin(), order.end(), random);
        run_block(count, order, random);
      }
    }
  }
}

}  // namespace emulated

// 0: threads run in order, 1: from the last to the first, others: in an order drawn from the seed.
extern "C" void emulated_set_thread_order(unsigned seed) { emulated::order_seed = seed; }

// Kernels launched by this process.
extern "C" unsigned long long emulated_num_launches() { return emulated::num_launches; }
