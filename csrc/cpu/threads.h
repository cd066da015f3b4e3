// Work on several threads, and memory for what lies between the stages of an op.
#pragma once

#include <cstdint>

namespace medusa {

enum Memory { kPrepared = 0, kBetween = 1, kWidened = 2 };

// At least `bytes` of memory, aligned to 64, that this thread keeps until it asks for the same memory again. Without room
// it throws, or returns null if the caller can do without.
void* scratch(Memory memory, int64_t bytes, bool needed = true);

// Calls task(data, 0) to task(data, tasks - 1), each once, on the caller's and up to threads - 1 other threads.
void run_tasks(int64_t threads, int64_t tasks, void (*task)(const void* data, int64_t index), const void* data);

namespace {

// Calls work(0) to work(tasks - 1), each once. What a task computes must not depend on the thread that takes it.
template <class Work>
inline void in_parallel(int64_t threads, int64_t tasks, const Work& work) {
  run_tasks(threads, tasks, [](const void* data, int64_t index) { (*static_cast<const Work*>(data))(index); }, &work);
}

}  // namespace
}  // namespace medusa
