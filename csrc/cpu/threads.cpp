// The threads of the CPU ops. A step has dozens of short stages, so a caller never waits for a thread that has not come:
// it does what nobody else has begun. On a machine that is busy with something else a step then loses little, where a
// barrier after each stage (OpenMP's) waits for the scheduler dozens of times.
#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace medusa {
namespace {

constexpr int kSpins = 2000;  // about 0.1 ms, longer than the time between two stages
constexpr int64_t kMostTasks = 1 << 20;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // False if the pool is busy with another caller's work, or there is no other thread.
  bool run(int64_t threads, int64_t tasks, void (*task)(const void*, int64_t), const void* data) {
    std::unique_lock<std::mutex> owned(owner_, std::try_to_lock);
    if (!owned.owns_lock() || !grow(threads - 1)) return false;
    task_ = task;
    data_ = data;
    done_.store(0, std::memory_order_relaxed);
    helpers_.store(threads - 1, std::memory_order_relaxed);
    const uint64_t mine = (ticket_.load(std::memory_order_relaxed) >> 40) + 1;
    ticket_.store(mine << 40 | static_cast<uint64_t>(tasks) << 20);
    if (sleeping_.load() > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    while (take()) {
    }
    // What others have begun, they finish soon, unless the scheduler has taken their processor away.
    for (int spins = 0; done_.load(std::memory_order_acquire) < tasks; ++spins) {
      if (spins < kSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
    return true;
  }

 private:
  // Does one task; false if none is left. A ticket is a job's number, its tasks (20 bits) and the next of them (20 bits):
  // whoever has got a task knows that the job cannot end before it, and only then reads what the task is.
  bool take() {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    const int64_t tasks = static_cast<int64_t>(ticket >> 20) & (kMostTasks - 1), next = ticket & (kMostTasks - 1);
    if (next >= tasks) return false;
    task_(data_, next);
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  bool work_left() const {
    const uint64_t ticket = ticket_.load();
    return (ticket & (kMostTasks - 1)) < ((ticket >> 20) & (kMostTasks - 1));
  }

  void help(int64_t number) {
    for (;;) {
      for (int spins = 0; spins < kSpins; ++spins) {
        if (work_left() && number < helpers_.load(std::memory_order_relaxed)) {
          while (work_left() && take()) {
          }
          spins = 0;
        }
        pause();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return work_left() && number < helpers_.load(std::memory_order_relaxed); });
      sleeping_.fetch_sub(1);
    }
  }

  bool grow(int64_t wanted) {
    try {
      for (; count_ < wanted; ++count_) std::thread(&Pool::help, this, count_).detach();
    } catch (const std::system_error&) {  // no more threads: those that there are will do
    }
    return count_ > 0;
  }

  std::mutex owner_;   // of the caller whose tasks run
  int64_t count_ = 0;  // threads started
  void (*task_)(const void*, int64_t) = nullptr;
  const void* data_ = nullptr;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> done_{0}, helpers_{0}, sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

std::atomic<bool> forked{false};  // a forked child has no threads but its own, and a lock may be held for ever

// Never destroyed: its threads may outlive everything else.
Pool& pool() {
  static Pool* const one = (pthread_atfork(nullptr, nullptr, [] { forked.store(true); }), new Pool);
  return *one;
}

// Memory that grows and stays: a step asks for the same again, and fresh pages cost more than their use.
struct Block {
  void* data = nullptr;
  int64_t size = 0;
  ~Block() { std::free(data); }
};

}  // namespace

void run_tasks(int64_t threads, int64_t tasks, void (*task)(const void*, int64_t), const void* data) {
  const int64_t used = threads < tasks ? threads : tasks;
  // Every thread may draw one ticket past the last task.
  const bool shared = used > 1 && tasks < kMostTasks / 2 && !forked.load(std::memory_order_relaxed);
  if (shared && pool().run(used, tasks, task, data)) return;
  for (int64_t i = 0; i < tasks; ++i) task(data, i);
}

void* scratch(Memory memory, int64_t bytes, bool needed) {
  thread_local Block blocks[3];
  Block& block = blocks[memory];
  if (bytes > block.size) {
    std::free(block.data);
    block.size = (bytes + 4095) / 4096 * 4096;
    block.data = std::aligned_alloc(64, static_cast<size_t>(block.size));
    if (block.data == nullptr) {
      block.size = 0;
      if (needed) throw std::bad_alloc();
    }
  }
  return block.data;
}

}  // namespace medusa
