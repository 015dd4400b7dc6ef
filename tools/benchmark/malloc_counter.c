/* Bytes of live tensors on the CPU, exact and over all threads. Preload it: LD_PRELOAD=malloc_counter.so.

   torch takes the memory of a CPU tensor by posix_memalign and gives it back by free, on whichever thread drops it last;
   torch's own profiler does not see the backend's threads. Counting starts with counter_start(): blocks that are older
   are not known, and cost one comparison. Needs glibc. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define SLOTS (1u << 20) /* blocks alive at once, a power of two; open addressing */
static struct { void *block; size_t size; } table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int counting;
static long live, peak;

static size_t home(void *block) { return ((uintptr_t)block >> 6) * 0x9E3779B97F4A7C15ull >> 44; }

static void add(void *block, size_t size) {
  size_t i = home(block);
  while (table[i].block) i = (i + 1) & (SLOTS - 1);
  table[i].block = block;
  table[i].size = size;
  live += size;
  if (live > peak) peak = live;
}

static void drop(void *block) {
  size_t i = home(block);
  while (table[i].block != block)
    if (!table[i].block) return; /* no tensor's, or older than the start */
    else i = (i + 1) & (SLOTS - 1);
  live -= table[i].size;
  /* Close the gap, or blocks behind it would not be found: whatever may move into it does. */
  for (size_t gap = i;;) {
    table[gap].block = NULL;
    for (;;) {
      i = (i + 1) & (SLOTS - 1);
      if (!table[i].block) return;
      if (((i - home(table[i].block)) & (SLOTS - 1)) >= ((i - gap) & (SLOTS - 1))) break;
    }
    table[gap] = table[i];
    gap = i;
  }
}

int posix_memalign(void **result, size_t alignment, size_t size) {
  void *block = __libc_memalign(alignment, size);
  if (!block) return ENOMEM;
  if (atomic_load_explicit(&counting, memory_order_relaxed)) {
    pthread_mutex_lock(&lock);
    add(block, size);
    pthread_mutex_unlock(&lock);
  }
  *result = block;
  return 0;
}

void free(void *block) {
  if (block && atomic_load_explicit(&counting, memory_order_relaxed)) {
    pthread_mutex_lock(&lock); /* before the block is gone: another thread may be given the same address */
    drop(block);
    pthread_mutex_unlock(&lock);
  }
  __libc_free(block);
}

void counter_start(void) { atomic_store(&counting, 1); }

long counter_live(void) {
  pthread_mutex_lock(&lock);
  long bytes = live;
  pthread_mutex_unlock(&lock);
  return bytes;
}

/* The most bytes alive at once since the last call. */
long counter_peak(void) {
  pthread_mutex_lock(&lock);
  long bytes = peak;
  peak = live;
  pthread_mutex_unlock(&lock);
  return bytes;
}
