// Work on several threads, and memory for what lies between the stages of an op.
#pragma once

#include <cstdint>

#include "ops.h"

namespace medusa {

enum Memory { kPrepared = 0, kBetween = 1 };

// At least `bytes` of memory, aligned to 64, that this thread keeps until it asks for the same memory again.
void* scratch(Memory memory, int64_t bytes);

namespace {

template <class Work>
struct Shared {
  const Work& work;
  const int64_t tasks;
  int64_t next;

  static void take(void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    for (;;) {
      const int64_t task = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED);
      if (task >= shared.tasks) return;
      shared.work(task);
    }
  }
};

// Calls work(0) to work(tasks - 1), each once, on up to `threads` threads. What a task computes must not depend on the
// thread that takes it.
template <class Work>
inline void in_parallel(int64_t threads, int64_t tasks, const Work& work) {
  Shared<Work> shared{work, tasks, 0};
  const int64_t used = threads < tasks ? threads : tasks;
  if (used <= 1 || parallel == nullptr) return Shared<Work>::take(&shared);
  parallel(Shared<Work>::take, &shared, static_cast<unsigned>(used), 0);
}

}  // namespace
}  // namespace medusa
